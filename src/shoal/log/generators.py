"""The states of torch's random generators, as commits keep them."""

from collections.abc import Mapping

import torch

from shoal.errors import StorageError
from shoal.records.excerpt import sentence


def random_states() -> dict[str, bytes]:
    """Returns the states of torch's generators as they are now, by name."""
    states = {"cpu": bytes(torch.get_rng_state().numpy().tobytes())}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for number in range(torch.cuda.device_count()):
            states[f"cuda:{number}"] = bytes(torch.cuda.get_rng_state(number).numpy().tobytes())
    return states


def set_random_states(where: str, states: Mapping[str, bytes]) -> None:
    """Sets the states of torch's generators. Those of devices that are not here are left out."""
    for name, state in states.items():
        tensor = torch.frombuffer(bytearray(state), dtype=torch.uint8) if state else torch.empty(0, dtype=torch.uint8)
        try:
            if name == "cpu":
                torch.set_rng_state(tensor)
            elif name in {f"cuda:{number}" for number in range(torch.cuda.device_count())}:
                torch.cuda.set_rng_state(tensor, int(name[5:]))
        except (RuntimeError, TypeError) as error:
            raise StorageError(
                f"[{where}] rng {name!r}: torch does not take this state: {sentence(str(error))}"
            ) from None
