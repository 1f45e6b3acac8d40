"""Tables in device memory and equal ones in host memory, on the same batches. Without a GPU, Triton interprets."""

from dataclasses import replace

import torch

import shoal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def in_hbm(table, size=None):
    """The same table in device memory."""
    return replace(table, tiers=[shoal.Hbm(size)])


def on_device(*tables, kind=shoal.EmbeddingBagCollection, seed=7, **settings):
    """A collection whose tables are in device memory."""
    tables = [table if table.tiers else in_hbm(table) for table in tables]
    return kind(tables, device=DEVICE, seed=seed, **settings)


def here(*values, dtype=None):
    """A tensor of keys, or of whatever, on the device."""
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def placed(batch, device=DEVICE):
    """A copy of a batch on a device, whose weights, if it has any, wait for a gradient."""
    weights = batch.weights_or_none()
    if weights is not None:
        weights = weights.detach().clone().to(device).requires_grad_()
    lengths = batch.lengths().to(device)
    return shoal.KeyedJaggedTensor(batch.keys(), batch.values().to(device), weights, lengths=lengths)


def outputs(out):
    """The tensors of an output."""
    return [out.values()] if isinstance(out, shoal.KeyedTensor) else [jagged.values() for jagged in out.values()]


def backward(out, seed=0, keep=1.0):
    """A backward with a gradient that depends on nothing but the seed; zeros in all but the part `keep` of its rows."""
    tensors, generator = outputs(out), torch.Generator().manual_seed(seed)
    grads = [torch.randn(tensor.shape, generator=generator) for tensor in tensors]
    if keep < 1.0:
        grads = [grad * (torch.rand(len(grad), 1, generator=generator) < keep) for grad in grads]
    torch.autograd.backward(tensors, [grad.to(tensor) for grad, tensor in zip(grads, tensors, strict=True)])


def train(module, batch, seed=0):
    """A forward and a backward on the device; returns the output, as one tensor."""
    out = module(placed(batch, module.device))
    backward(out, seed)
    return torch.cat([tensor.detach().float().flatten() for tensor in outputs(out)])


def assert_close(ours, wanted, what=""):
    """Within a rounding of the type that they have; integers to the bit."""
    assert (ours.dtype, ours.shape) == (wanted.dtype, wanted.shape), what
    rounding = ROUNDING[wanted.dtype] if wanted.is_floating_point() else 0.0
    torch.testing.assert_close(
        ours.cpu(), wanted, rtol=rounding, atol=rounding / 10, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


def assert_alike(device, host, exact=False):
    """The tables hold the same: keys, scores and steps to the bit, weights and state within a rounding."""
    ours, wanted = device.state_dict(), host.state_dict()
    assert list(ours) == list(wanted)
    for name, value in wanted.items():
        if exact or not value.is_floating_point() or value.dtype == torch.float64:
            assert torch.equal(ours[name].cpu(), value), name
        else:
            assert_close(ours[name], value, name)


class Twins:
    """A collection in host memory and its equal in device memory."""

    def __init__(self, *tables, kind=shoal.EmbeddingBagCollection, seed=7, **settings):
        self.host = kind(list(tables), seed=seed, **settings)
        self.device = on_device(*tables, kind=kind, seed=seed, **settings)

    def forward(self, batch):
        """Both outputs, once they were compared, and both batches."""
        batches = [placed(batch, "cpu"), placed(batch)]
        outs = [module(one) for module, one in zip((self.host, self.device), batches, strict=True)]
        for wanted, ours in zip(*map(outputs, outs), strict=True):
            assert_close(ours.detach(), wanted.detach(), "output")
        return outs, batches

    def step(self, batch, seed=0, keep=1.0):
        """One step of both: outputs and the gradients of weights must agree."""
        outs, batches = self.forward(batch)
        for out in outs:
            backward(out, seed, keep)
        grads = [None if one.weights_or_none() is None else one.weights().grad for one in batches]
        if grads[0] is not None:
            assert_close(grads[1], grads[0], "the weights' gradient")

    def evaluate(self, batch):
        """Both outputs in eval."""
        for module in (self.host, self.device):
            module.eval()
        outs, _batches = self.forward(batch)
        for module in (self.host, self.device):
            module.train()
        return outs

    def each(self, work):
        """What both say to the same question, moved to the host."""
        return [_on_host(work(module)) for module in (self.host, self.device)]

    def check(self, exact=False):
        """Nothing went wrong, and both hold the same."""
        self.device.check()
        assert_alike(self.device, self.host, exact)


def _on_host(answer):
    if isinstance(answer, torch.Tensor):
        return answer.cpu()
    return {name: value.cpu() for name, value in answer.items()} if isinstance(answer, dict) else answer
