"""Making a log, and cutting a log whose writer died back to its last whole commit."""

import warnings

from shoal import _native
from shoal.errors import CheckpointError, ShoalWarning
from shoal.log.compact import compacting
from shoal.log.files import Files, is_new, make_file, names_in, remove_file, remove_folder
from shoal.log.head import read_head
from shoal.log.manifest import Manifest, changing_manifest, new_manifest, read_manifest, write_manifest
from shoal.log.segment import header_of
from shoal.log.segment_file import Scan, SegmentFile


class TornTailWarning(ShoalWarning):
    """A log's writer had died in a commit; the part of it that was written is cut off."""


def require_empty(files: Files, where: str) -> None:
    """Raises CheckpointError where a folder has something else than a log."""
    if not is_new(files):
        return
    known = {
        "LOCK",
        "MANIFEST.lock",
        "COMPACT",
        "HEAD",
        "segments",
        "dense",
        "snapshots",
        "WRITER.json",
        "WRITER.json.tmp",
    }
    known |= {"MANIFEST.json.tmp", "MANIFEST.json"}  # another process may be making one
    others = [name for name in names_in(files.root) if name not in known]
    if others:
        raise CheckpointError(
            f"[{where}] wanted a log or an empty folder; got one with {', '.join(sorted(others)[:3])}. Name another "
            f"path."
        )


def create(files: Files) -> None:
    """Makes a log without commits."""
    files.make()
    manifest = new_manifest()
    new_segment(files, manifest, 1)
    _native.sync_directory(files.root)
    write_manifest(files, manifest)


def new_segment(files: Files, manifest: Manifest, first: int) -> None:
    """Makes an empty segment, which the manifest does not name yet."""
    path = files.segment(first)
    make_file(path, header_of(manifest.identity, first))
    _native.sync_directory(path.parent)


def cut_tail(files: Files, manifest: Manifest, where: str) -> tuple[int, int]:
    """Cuts off what comes after the last whole commit, unless the log said that it was on the disk. Returns where that
    commit ends in the last segment, and its version."""
    first = manifest.segments[-1]
    head = read_head(files)
    segment = SegmentFile(files.segment(first), manifest.identity, first)
    try:
        segment.check_header()
        begin, version = len(header_of(manifest.identity, first)), manifest.before(first)
        if head.segment == first:
            begin, version = head.end, head.version
        scan = Scan(begin)
        for whole in segment.commits(begin, scan, kept_to=begin):
            version = whole.commit.version
        size = segment.size()
        if size < begin:
            raise segment.damaged(size, version, f"{begin} bytes were on the disk")
        if scan.problem is None:
            return scan.end, version
        if segment.is_promised(version + 1, scan):
            raise segment.damaged(scan.end, version + 1, scan.problem)
    finally:
        segment.close()
    warnings.warn(
        TornTailWarning(
            f"[{where}] its last writer died in version {version + 1}: {size - scan.end} bytes after version "
            f"{version} are cut off ({scan.problem})."
        ),
        stacklevel=5,  # the line that opens the log
    )
    with _native.File.open_to_write(files.segment(first)) as file:
        file.truncate(scan.end)
        file.sync()
    return scan.end, version


def remove_strangers(files: Files, manifest: Manifest, version: int) -> None:
    """Removes what writers that died left: files that the manifest does not name, and dense weights of versions after
    one."""
    segments = {files.segment(first).name for first in manifest.segments}
    for name in names_in(files.segments):
        if name not in segments:
            remove_file(files.segments / name)
    with compacting(files) as lock:
        if lock:
            # Read again: another process may have made a snapshot since this log was opened.
            snapshots = {files.snapshot(one.version).name for one in read_manifest(files).snapshots}
            for name in names_in(files.snapshots):
                if name not in snapshots:
                    remove_folder(files.snapshots / name)
    for name in names_in(files.dense):
        if not name.partition(".")[0].isdecimal() or int(name.partition(".")[0]) > version:
            remove_file(files.dense / name)
    with changing_manifest(files):  # a process that compacts may be writing one
        remove_file(files.manifest.with_name(files.manifest.name + ".tmp"))
