"""Which optimizer trained rows, told by their state columns, for errors where a table has another one."""

from collections.abc import Mapping

from shoal.config.optimizers import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Assign,
    Ftrl,
    Optimizer,
    PartialRowwiseAdam,
    RowwiseAdagrad,
)

# Every kind of row state that an optimizer of ours has.
_OPTIMIZERS: tuple[tuple[str, Optimizer | None], ...] = (
    ("SGD", SGD()),
    ("SGD with momentum", SGD(momentum=0.9)),
    ("Adagrad", Adagrad()),
    ("RowwiseAdagrad", RowwiseAdagrad()),
    ("Adam", Adam()),
    ("AdamW", AdamW()),
    ('Adam with bias_correction="global"', Adam(bias_correction="global")),
    ('AdamW with bias_correction="global"', AdamW(bias_correction="global")),
    ("PartialRowwiseAdam", PartialRowwiseAdam()),
    ('PartialRowwiseAdam with bias_correction="global"', PartialRowwiseAdam(bias_correction="global")),
    ("Ftrl", Ftrl()),
    ("Assign", Assign()),
    ("no optimizer", None),
)


def widths_of(optimizer: Optimizer | None, dim: int) -> dict[str, int | None]:
    """The widths of its state columns, by name."""
    return {} if optimizer is None else {column.name: column.width for column in optimizer.columns(dim)}


def optimizers_with(widths: Mapping[str, int | None], dim: int, kind: str | None = None) -> list[str]:
    """What can have trained rows with these state columns. kind: the optimizer's class, "" for none, None where that
    is not known."""
    return [
        name
        for name, known in _OPTIMIZERS
        if widths_of(known, dim) == widths and kind in (None, "" if known is None else type(known).__name__)
    ]


def trained_otherwise(
    table: str, dim: int, optimizer: Optimizer | None, kind: str | None, widths: Mapping[str, int | None]
) -> str | None:
    """A sentence that says that the rows' optimizer, or its state, is not the table's; None where both are the same.
    kind and widths are of the rows, as `optimizers_with` takes them."""
    own, own_widths = "" if optimizer is None else type(optimizer).__name__, widths_of(optimizer, dim)
    if kind in (None, own) and widths == own_widths:
        return None
    was = optimizers_with(widths, dim, kind) or ["an optimizer that is not known" if kind is None else kind]
    has = optimizers_with(own_widths, dim, own) or [own]
    return (
        f"table {table!r} was trained by {' or '.join(was)} ({_shown(widths)}), and has {has[0]} "
        f"({_shown(own_widths)})."
    )


def _shown(widths: Mapping[str, int | None]) -> str:
    return ", ".join(f"{name}[{width}]" for name, width in widths.items()) or "no state"
