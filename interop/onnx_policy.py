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
from interop.twin.parts import check_remembered, in_type, load_tokenizer, policy_inputs
from interop.twin.text import TextReader


class OnnxPolicy:
    """A policy in ONNX Runtime: ``act`` and ``reset`` as those of ``interop.twin.acting.Twin``."""

    def __init__(self, spec: Spec, session: Any, tokenizer: TextReader | None = None) -> None:
        self.spec, self.tokenizer, self._session = spec, tokenizer, session
        self.memory: NDArray[np.float32] | None = None
        """[..., M], of the rows of the last ``act``. None: an episode starts."""

    def act(self, obs: Any, noise: Any = None) -> NDArray[Any]:
        """Act as ``TorchPolicy.act`` does: [..., A] float32, or int32 choices. Raises ValueError: a part is missing, or
        of another shape or kind; or the leading axes are not those of what the policy remembers."""
        leaves, batch = policy_inputs(self.spec, obs, self.tokenizer, noise)
        outputs = ["action"]
        if self.spec.memory is not None:
            outputs.append(NEXT_MEMORY)
            leaves.append(self._remembered(batch, self.spec.memory.size))
        named = zip(self.spec.inputs, leaves, strict=True)
        given = {name: in_type(x, self.spec.input_dtype(name), name) for name, x in named}
        action, *after = self._session.run(outputs, given)
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


def load_policy(directory: Path | str) -> OnnxPolicy:
    """Load an export with the format onnx, from its ``policy.json``, ``policy.onnx`` and, if it reads text,
    ``tokenizer.json``. Raises FileNotFoundError: one of them is missing. ValueError: one is not an export's."""
    directory = Path(directory)
    spec = load_spec(directory / "policy.json")
    return OnnxPolicy(spec, open_session(directory / "policy.onnx"), load_tokenizer(directory, spec))
