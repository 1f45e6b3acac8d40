"""Backwards in host memory: gradients to rows."""

from collections.abc import Sequence

from torch import Tensor

from shoal.errors import NonFiniteError
from shoal.ops.update import LeftOut, all_finite, update, weight_gradients
from shoal.optim import raises_nonfinite
from shoal.table.decided import Decided
from shoal.table.host.forward import Forward
from shoal.table.host.large import Large, LargeUpdate
from shoal.table.host.pieces import Reader
from shoal.table.host.table import HostTable
from shoal.table.nonfinite import Judged, Reached, require_skipping
from shoal.table.parts import Part
from shoal.table.protocols import LossScale


class Updates:
    """What the backwards of a group do to its tables. The group's exclusive lock covers it."""

    def __init__(self, name: str, tables: Sequence[HostTable], decided: Decided) -> None:
        self._name = name
        self._tables = tables
        self._decided = decided

    def weight_gradients(self, forward: Forward, values: Tensor, offsets: Tensor, grads: Sequence[Tensor]) -> Tensor:
        """Returns the gradient of every per-sample weight, from the rows as they are now."""
        plan = forward.plan
        if forward.large is not None:
            reader = Reader(self._tables, plan, values, offsets, forward.weights, {}, forward.large.seen)
            return reader.weight_gradients(grads[0])
        return weight_gradients(
            plan.weight_rows, plan.weight_features, grads, plan.weight_missing, forward.bags, forward.keys
        )

    def run(
        self,
        forward: Forward,
        grads: Sequence[Tensor],
        values: Tensor,
        offsets: Tensor,
        scale: LossScale | None,
        skip: bool | Tensor | None,
    ) -> None:
        """Apply the gradients of a training forward. `scale`: of the loss, if a scaler scales it. `skip`: whether rows
        stay as they are, if that is decided."""
        plan = forward.plan
        trained = [self._tables[number] for number in plan.trained]
        factor = 1.0 if scale is None else scale.factor()
        if self._is_skipped(forward, grads, offsets, scale) if skip is None else bool(skip):
            for table in trained:
                table.counters.add("skipped_backwards")
            self._decided.do(self._leave_out, forward)
            return
        grads = grads if len(grads) == 1 else [grads[at] for at in plan.training_parts]
        if forward.large is not None:
            left_out = self._run_in_pieces(forward, forward.large, grads, values, offsets, factor)
        else:
            left_out = update(
                [
                    table.native_update(forward.scores[number], 1.0 / factor)
                    for number, table in zip(plan.trained, trained, strict=True)
                ],
                plan.update_features,
                grads,
                forward.bags,
            )
            for number, keys in forward.refused.items():
                self._tables[number].drop_gradients(keys)
        overflowed = [(trained[counts.table], counts.overflowed) for counts in left_out]
        if overflowed and scale is not None:
            scale.found_nonfinite()
        elif any(raises_nonfinite(table.config.optimizer) for table, _ in overflowed):
            rows = ", ".join(f"{count} of {table.config.name!r}" for table, count in overflowed)
            raise NonFiniteError(
                f"[{self._name}] gradients are finite, but for some rows their sum is too large (its norm above 1e15): "
                f"{rows}. These rows were left as they were, the others updated. Scale the loss down, or clip; where "
                f"a GradScaler scales it, set bags.scaler = scaler."
            )

    def _run_in_pieces(
        self, forward: Forward, large: Large, grads: Sequence[Tensor], values: Tensor, offsets: Tensor, factor: float
    ) -> Sequence[LeftOut]:
        change = LargeUpdate(self._tables, forward, large, factor, self._decided)
        self._decided.do(change.run, values, offsets, forward.weights, *grads)
        return change.left_out

    def _leave_out(self, forward: Forward) -> None:
        """End a backward that changes no row. Its keys were used all the same."""
        forward.touch(self._tables)
        forward.bags.applied = True

    def _is_skipped(self, forward: Forward, grads: Sequence[Tensor], offsets: Tensor, scale: LossScale | None) -> bool:
        """Whether NaN or infinity is on its way to the rows, and settings say to skip; raises where they do not."""
        if self._are_finite(forward, grads):
            return False
        if scale is not None:
            scale.found_nonfinite()
            return True
        reached = self._reached(forward, grads, offsets)
        require_skipping(self._name, reached)
        return bool(reached)

    def judge(self, forward: Forward, grads: Sequence[Tensor], offsets: Tensor) -> Judged:
        """Look for NaN and infinity in gradients. Changes nothing."""
        if not forward.training or self._are_finite(forward, grads):
            return Judged(False)
        return Judged(True, self._reached(forward, grads, offsets))

    @staticmethod
    def _are_finite(forward: Forward, grads: Sequence[Tensor]) -> bool:
        return all(map(all_finite, grads)) and (forward.weights is None or all_finite(forward.weights))

    def _reached(self, forward: Forward, grads: Sequence[Tensor], offsets: Tensor) -> list[Reached]:
        """Where NaN or infinity reaches rows."""
        found = [
            (self._tables[part.table], part.feature.name)
            for part in forward.plan.parts
            if part.trains and self._is_reached(forward, grads, offsets, part)
        ]
        return [
            Reached(table.config.name, feature, raises_nonfinite(table.config.optimizer)) for table, feature in found
        ]

    @staticmethod
    def _is_reached(forward: Forward, grads: Sequence[Tensor], offsets: Tensor, part: Part) -> bool:
        if forward.weights is not None:
            bounds = forward.bags.bounds
            if not all_finite(forward.weights[bounds[part.source] : bounds[part.source + 1]]):
                return True
        if not forward.plan.columns:
            return not all_finite(grads[forward.plan.parts.index(part)])
        # The gradient of an empty bag goes nowhere.
        bags = offsets[part.source * forward.size : (part.source + 1) * forward.size + 1]
        return not all_finite(grads[0][bags.diff() > 0, part.column : part.column + part.dim])
