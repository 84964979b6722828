"""The torch twin of ``ejax.policies.vision``'s encoder: an image to the places where its channels are active."""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from interop.twin.spec import EncoderSpec


class ImageEncoder(nn.Module):
    """uint8 [..., H, W, C] -> [..., 2·channels], float32. Its convolutions are called 0, 1, 2. Raises ValueError: an
    image of another shape or dtype."""

    _places: Tensor

    def __init__(self, spec: EncoderSpec, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.shape = shape
        height, width, inputs = shape
        for i, (outputs, kernel, stride) in enumerate(zip(spec.channels, spec.kernels, spec.strides, strict=True)):
            self.add_module(str(i), nn.Conv2d(inputs, outputs, kernel, stride))
            inputs = outputs
        # rows and columns alike: F.pad takes the last axis first
        self.padding = [(before, behind, before, behind) for before, behind in spec.padding]
        rows, columns = spec.places(height, width)
        grid = torch.meshgrid(torch.linspace(-1.0, 1.0, rows), torch.linspace(-1.0, 1.0, columns), indexing="ij")
        self.register_buffer("_places", torch.stack(grid, dim=-1).reshape(-1, 2), persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        image = checked_image(image, self.shape)
        x = image.reshape(-1, *image.shape[-3:]).permute(0, 3, 1, 2)
        x = x.to(torch.float32) / 127.5 - 1.0
        for convolution, padding in zip(self.children(), self.padding, strict=True):
            x = torch.relu(convolution(nn.functional.pad(x, padding)))
        share = torch.softmax(x.flatten(2), dim=-1)
        row_and_column = share @ self._places  # [B, channels, 2]
        return row_and_column.transpose(1, 2).reshape(*image.shape[:-3], -1)


def checked_image(image: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Check the image [..., H, W, C], and return it. Raises ValueError: it is of another shape or dtype; a trace checks
    it too."""
    # in a trace plain Python would check once, for the example, and never again
    checked = _scripted() if torch.jit.is_tracing() else _checked
    return checked(image, list(shape))


def _checked(image: Tensor, shape: list[int]) -> Tensor:
    if image.dtype != torch.uint8 or list(image.shape[-3:]) != shape:
        raise ValueError(
            f"the image is {image.dtype} {list(image.shape)}, but the policy was made for torch.uint8 with rows, "
            f"columns and channels {shape}, bytes from 0 to 255; resize it, and do not scale it"
        )
    return image


@functools.cache
def _scripted() -> Any:
    """Compile ``_checked`` in TorchScript: a trace would drop plain Python."""
    return torch.jit.script(_checked)
