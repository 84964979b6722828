"""A vision-language-action policy in ONNX Runtime, driven by text. Needs onnxruntime and numpy; no jax, no torch.

policy = load_policy(Path("exported"))
action = policy.act({"image": image, "state": state, "instruction": "put the red cube in the left zone"})
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interop.standalone_verify import open_session
from interop.twin.kinds import load_spec
from interop.twin.parts import vla_inputs, vla_tokenizer
from interop.twin.text import Tokenizer
from interop.twin.vla_spec import VLASpec


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
        arrays = {
            name: np.asarray(x, self.spec.input_dtype(name)) for name, x in zip(self.spec.inputs, leaves, strict=True)
        }
        return self._session.run(["action"], arrays)[0].reshape(*batch, -1)


def load_policy(directory: Path | str) -> OnnxVLA:
    """Load an export with the format onnx, from its policy.json, policy.onnx and tokenizer.json.

    Raises:
        FileNotFoundError: one of them is missing. ValueError: one is not an export's, or of a policy without text.
    """
    directory = Path(directory)
    spec = load_spec(directory / "policy.json")
    if not isinstance(spec, VLASpec):
        raise ValueError(
            f"{directory} holds a policy without text: give its policy.onnx the arrays that contract.json lists, as "
            "examples/deploy_onnx.py does"
        )
    return OnnxVLA(spec, vla_tokenizer(directory, spec), open_session(directory / "policy.onnx"))
