"""Exported policies of every kind in ONNX Runtime. Needs onnxruntime and numpy; no jax, no torch.

policy = load_policy(Path("exported"))
action = policy.act(obs)                                  # NumPy arrays, deterministic, clipped
policy.reset()                                            # of a policy with memory, where an episode ends
action = policy.act({"image": image, "state": state, "instruction": "put the red cube in the left zone"})
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interop.standalone_verify import NEXT_MEMORY, open_session
from interop.twin.kinds import Spec, load_spec
from interop.twin.parts import check_remembered, in_type, network_inputs, vla_inputs, vla_tokenizer
from interop.twin.program_spec import ProgramSpec
from interop.twin.spec import PolicySpec
from interop.twin.text import Tokenizer
from interop.twin.vla_spec import VLASpec


class OnnxPolicy:
    """A policy without text in ONNX Runtime: ``act`` and ``reset`` as those of ``interop.policy.TorchPolicy``."""

    def __init__(self, spec: PolicySpec | ProgramSpec, session: Any) -> None:
        self.spec, self._session = spec, session
        self.memory: NDArray[np.float32] | None = None
        """[..., M], of the rows of the last ``act``. None: an episode starts."""

    def act(self, obs: Any) -> NDArray[Any]:
        """Act as ``TorchPolicy.act`` does: [..., A] float32, or int32 choices.

        Raises:
            ValueError: a part is missing, or of another shape or kind; or the leading axes are not those of what the
                policy remembers.
        """
        leaves, batch = network_inputs(self.spec, obs)
        outputs = ["action"]
        if self.spec.memory is not None:
            outputs.append(NEXT_MEMORY)
            leaves.append(self._remembered(batch, self.spec.memory.size))
        action, *after = self._session.run(outputs, _feed(self.spec, leaves))
        if after:
            self.memory = after[0].reshape(*batch, -1)
        return action.reshape(*batch, *action.shape[1:])

    def reset(self, rows: Any = None) -> None:
        """Forget: new episodes start, in all rows or in those where ``rows`` [...] is true."""
        if rows is None:
            self.memory = None
        elif self.memory is not None:
            self.memory = np.where(np.asarray(rows, bool)[..., None], np.float32(0.0), self.memory)

    def _remembered(self, batch: tuple[int, ...], size: int) -> NDArray[np.float32]:
        if self.memory is None:
            self.memory = np.zeros((*batch, size), np.float32)
        check_remembered(self.memory, batch)
        return self.memory.reshape(-1, size)


class OnnxVLA:
    """A VLA policy in ONNX Runtime, without torch or JAX: ``act`` as that of ``interop.twin.vla.TorchVLA``."""

    def __init__(self, spec: VLASpec, tokenizer: Tokenizer, session: Any) -> None:
        self.spec, self.tokenizer, self._session = spec, tokenizer, session

    def act(self, obs: Any, noise: Any = None) -> NDArray[np.float32]:
        """See ``TorchVLA.act``.

        Raises:
            ValueError: a part is missing, or of another shape or kind.
        """
        leaves, batch = vla_inputs(self.spec, self.tokenizer, obs, noise, lambda x, name: np.asarray(x))
        return self._session.run(["action"], _feed(self.spec, leaves))[0].reshape(*batch, -1)


def load_policy(directory: Path | str) -> OnnxPolicy | OnnxVLA:
    """Load an export with the format onnx, from its ``policy.json``, ``policy.onnx`` and, of a VLA, ``tokenizer.json``.

    Raises:
        FileNotFoundError: one of them is missing. ValueError: one is not an export's.
    """
    directory = Path(directory)
    spec = load_spec(directory / "policy.json")
    if isinstance(spec, VLASpec):
        return OnnxVLA(spec, vla_tokenizer(directory, spec), open_session(directory / "policy.onnx"))
    return OnnxPolicy(spec, open_session(directory / "policy.onnx"))


def _feed(spec: Spec, leaves: list[Any]) -> dict[str, NDArray[Any]]:
    return {name: in_type(x, spec.input_dtype(name), name) for name, x in zip(spec.inputs, leaves, strict=True)}
