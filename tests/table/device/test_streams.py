"""Which stream waits for which: on streams that are not real, and know what is before what they are given next."""

from types import SimpleNamespace

import pytest
import torch

from shoal import torch_private
from shoal.table.device import streams as module
from shoal.table.device.streams import Streams


class Stream:
    """Knows what is done by the time that it gets there."""

    def __init__(self, number):
        self.cuda_stream = number
        self.done = frozenset()

    def launch(self, what):
        self.done |= {what}

    def record_event(self):
        return SimpleNamespace(done=self.done)

    def wait_event(self, event):
        self.done |= event.done

    def wait_stream(self, other):
        self.done |= other.done


class Cuda:
    """What Streams asks of torch.cuda."""

    def __init__(self):
        self.now = Stream(0)
        self.made = 0

    def current_stream(self, _device):
        return self.now

    def is_current_stream_capturing(self):
        return False

    def Stream(self, _device=None, priority=0):
        self.made += 1
        return Stream(self.made)

    def stream(self, stream):
        return On(self, stream)


class On:
    def __init__(self, cuda, stream):
        self.cuda, self.stream = cuda, stream

    def __enter__(self):
        self.before, self.cuda.now = self.cuda.now, self.stream

    def __exit__(self, *_error):
        self.cuda.now = self.before


@pytest.fixture
def cuda(monkeypatch):
    cuda = Cuda()
    monkeypatch.setattr(module, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(torch_private, "current_stream_handle", lambda _device: cuda.now.cuda_stream)
    return cuda


@pytest.fixture
def streams(cuda):
    made = Streams("bags", torch.device("cuda", 0), lambda: None)
    assert made.placing is not None
    return made


def lookup(cuda, streams, what):
    """One that trains; its rows are found before they are read."""
    streams.follow(exclusive=True)
    cuda.now.launch(f"{what} finds")
    found = cuda.now.record_event()
    cuda.now.launch(f"{what} reads")
    streams.looked_up(found)


def evaluate(cuda, streams, what):
    streams.follow(exclusive=False)
    cuda.now.launch(what)


def update(cuda, streams, what):
    streams.follow(exclusive=True, update=True)
    cuda.now.launch(what)


def before_placing(streams):
    with streams.place(None):
        streams.placing.launch("rows move")
    return streams.placing.done


def test_rows_are_placed_behind_the_last_find_and_beside_its_update(cuda, streams):
    lookup(cuda, streams, "lookup")
    update(cuda, streams, "update")
    assert before_placing(streams) == {"lookup finds", "rows move"}
    lookup(cuda, streams, "next")
    assert cuda.now.done > {"update", "rows move", "next finds"}


def test_what_is_found_for_batches_on_their_way_does_not_make_those_before_them_wait(cuda, streams):
    lookup(cuda, streams, "lookup")
    with cuda.stream(streams.placing):
        evaluate(cuda, streams, "find")
    update(cuda, streams, "update")
    assert "update" not in before_placing(streams)


@pytest.mark.parametrize("updates_on", ["the lookup's stream", "the other's", "a third"])
def test_rows_are_not_placed_beside_a_lookup_on_another_stream_that_an_update_followed(updates_on, cuda, streams):
    lookup(cuda, streams, "lookup")
    other = cuda.Stream()
    with cuda.stream(other):
        evaluate(cuda, streams, "eval")
    on = {"the lookup's stream": cuda.now, "the other's": other, "a third": cuda.Stream()}[updates_on]
    with cuda.stream(on):
        update(cuda, streams, "update")
    assert before_placing(streams) >= {"lookup finds", "eval"}


def test_rows_are_not_placed_beside_lookups_in_eval(cuda, streams):
    lookup(cuda, streams, "lookup")
    update(cuda, streams, "update")
    evaluate(cuda, streams, "eval here")
    with cuda.stream(cuda.Stream()):
        evaluate(cuda, streams, "eval there")
    assert before_placing(streams) >= {"eval here", "eval there"}


def test_lookups_in_eval_are_behind_rows_that_were_placed(cuda, streams):
    lookup(cuda, streams, "lookup")
    before_placing(streams)
    update(cuda, streams, "update")
    assert "rows move" not in cuda.now.done
    for stream in (cuda.now, cuda.Stream()):
        with cuda.stream(stream):
            evaluate(cuda, streams, "eval")
            assert stream.done >= {"rows move", "update"}
