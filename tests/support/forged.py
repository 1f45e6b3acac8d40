"""Logs whose checksums are all right, whatever is written to them, for tests."""

import json
from dataclasses import replace

from shoal import _native
from shoal.log.commit import id_of
from shoal.log.files import sealed_json
from shoal.log.segment import digest_of
from shoal.records import strict_json
from shoal.records.frames import FrameHeader, Kind, inflated


def content_of(payload):
    """What a commit frame says, and the states of generators."""
    text, _, binary = payload.partition(b"\0")
    return json.loads(text), binary


def payload_of(value, binary):
    """The opposite."""
    text = strict_json.encode(value, "test")
    return text + b"\0" + binary if binary else text


class Forged:
    """A log whose checksums are all right, whatever is written to it."""

    def __init__(self, path):
        self.path = path
        self.manifest = self.unsealed("MANIFEST.json")

    def unsealed(self, name):
        return json.loads((self.path / name).read_bytes().rpartition(b"\ncrc32c")[0])

    def write_manifest(self):
        (self.path / "MANIFEST.json").write_bytes(sealed_json(self.manifest))

    def write_snapshot(self, change):
        name = f"snapshots/{self.manifest['snapshots'][-1]['version']:020}/SNAPSHOT.json"
        value = self.unsealed(name)
        change(value)
        (self.path / name).write_bytes(sealed_json(value))
        self.manifest["snapshots"][-1]["crc32c"] = _native.crc32c((self.path / name).read_bytes())
        self.write_manifest()

    def write_segment(self, change):
        """Write the last segment anew, of frames that `change` takes and gives, as headers and inflated payloads. A
        commit names the one before it as that is now, where it named it before."""
        path, content, frames = self._last_segment()
        written, headers = content[:64], []
        ids = {id_of(payload): header.version for header, payload in frames if header.kind is Kind.COMMIT}
        renamed = {}
        for header, payload in change(frames):
            if header.kind is Kind.COMMIT:
                value, binary = content_of(payload)
                value |= {"frames": digest_of(headers)}
                before = value["commit"]["before"]
                value["commit"]["before"] = renamed.get(ids.get(before), before)
                payload, headers = payload_of(value, binary), []
                renamed[header.version] = id_of(payload)
                header = replace(header, payload_bytes=len(payload))
            packed = replace(header, payload_crc=_native.crc32c(payload)).pack()
            headers += [] if header.kind is Kind.COMMIT else [packed]
            written += packed + payload + bytes(-len(payload) % 64)
        path.write_bytes(written)
        (self.path / "HEAD").unlink()

    def write_text(self, change):
        """Write the last commit's text anew, which `change` takes and gives."""
        path, content, frames = self._last_segment()
        header, payload = frames[-1]
        before, *binary = payload.split(b"\0", 1)
        text = b"\0".join([change(before), *binary])
        header = replace(header, payload_bytes=len(text), payload_crc=_native.crc32c(text))
        begin = len(content) - frames[-1][0].frame_bytes
        path.write_bytes(content[:begin] + header.pack() + text + bytes(-len(text) % 64))
        (self.path / "HEAD").unlink()

    def _last_segment(self):
        """Its path, its bytes, and its frames as headers and inflated payloads."""
        path = sorted((self.path / "segments").iterdir())[-1]
        content, frames, at = path.read_bytes(), [], 64
        while at < len(content):
            header = FrameHeader.unpack(content[at : at + 64], "test")
            payload = bytes(inflated(header, content[at + 64 : at + 64 + header.payload_bytes], "test"))
            at += header.frame_bytes
            plain = {"payload_bytes": len(payload), "payload_crc": _native.crc32c(payload), "inflated_bytes": 0}
            frames.append((replace(header, **plain), payload))
        return path, content, frames

    def write_commit(self, change):
        """Change what the last commit says."""

        def changed(frames):
            header, payload = frames[-1]
            value, binary = content_of(payload)
            change(value["commit"])
            return [*frames[:-1], (header, payload_of(value, binary))]

        self.write_segment(changed)

    def write_dense(self, content):
        """Of the last commit that has it."""
        path = sorted((self.path / "dense").iterdir())[-1]
        path.write_bytes(content)
        seal = {"bytes": len(content), "crc32c": _native.crc32c(content)}
        self.write_commit(lambda commit: commit["dense"].update(seal))

    def set_layouts(self, **fields):
        for layout in self.manifest["tables"]:
            layout.update(fields)
        self.write_manifest()

    def set_blocks(self, at, number):
        """One of the six numbers of each block, in the list."""

        def change(value):
            for table in value["tables"].values():
                for block in table["blocks"]:
                    block[at] = number

        self.write_snapshot(change)

    def set_tables(self, **fields):
        self.write_commit(lambda commit: [one.update(fields) for one in commit["tables"].values()])

    def set_headers(self, **fields):
        self.write_segment(
            lambda frames: [
                (header if header.kind is Kind.COMMIT else replace(header, **fields), payload)
                for header, payload in frames
            ]
        )
