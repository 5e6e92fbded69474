"""Images of classes, by a transformer in a few steps from noise: a pipeline of diffusers.

`bigsgan export --format diffusers` puts a copy of this file into its folder. It needs diffusers alone.

Shapes: N images, C channels of what the transformer makes, R x R of its pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils.torch_utils import randn_tensor


class FlowPipeline(DiffusionPipeline):
    """Makes images with a ``DiTTransformer2DModel`` whose time t is from 0 (data) to 1 (noise).

    Args:
        transformer: Estimates velocities or images from (1 - t) x + t z. Its last class stands for none.
        scheduler: A ``FlowMatchEulerDiscreteScheduler``.
        vae: Decodes what the transformer makes; None if that is an image.
        time_scale: Factor of times before they are embedded.
        prediction: What the transformer estimates: ``velocity``, z - x, or ``sample``, x.
        steps: Steps from noise to an image by default.
        guidance: Factor on the distance of estimates from those of no class by default; needs a transformer that was
            trained with images of no class.
    """

    model_cpu_offload_seq = "transformer->vae"
    _optional_components = ("vae",)
    # what the base class has, which type checkers do not see
    transformer: Any
    scheduler: Any
    vae: Any
    config: Any
    register_modules: Any
    register_to_config: Any
    _execution_device: Any

    def __init__(
        self,
        transformer: Any,
        scheduler: Any,
        vae: Any = None,
        time_scale: float = 1000.0,
        prediction: str = "velocity",
        steps: int = 1,
        guidance: float = 1.0,
    ) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler, vae=vae)
        self.register_to_config(time_scale=time_scale, prediction=prediction, steps=steps, guidance=guidance)
        for block in transformer.transformer_blocks:  # frequencies as in the published DiT, not as in diffusers
            block.norm1.emb.time_proj.downscale_freq_shift = 0

    @torch.no_grad()
    def __call__(
        self,
        class_labels: Sequence[int],
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        generator: torch.Generator | None = None,
        latents: torch.Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
    ) -> Any:
        """Return one image of each class.

        Args:
            class_labels: Numbers of classes; 0 where there are none.
            num_inference_steps: Steps from noise; ``steps`` of the folder by default.
            guidance_scale: ``guidance`` of the folder by default. Unless 1, a step takes two passes.
            generator: Draws noise.
            latents: Noise (N, C, R, R) to begin with.
            output_type: ``pil``, ``np``, ``pt`` in [0, 1], or ``latent`` for what the transformer makes.
            return_dict: Return an ``ImagePipelineOutput`` instead of a tuple.
        """
        config, model = self.config, self.transformer
        num, size = config.steps if num_inference_steps is None else num_inference_steps, model.config.sample_size
        if num < 1 or (num > 1 and config.prediction == "sample"):
            raise ValueError(f"num_inference_steps must be {'1' if num > 1 else 'at least 1'}, got {num}")
        shape = len(class_labels), model.config.in_channels, size, size
        x = randn_tensor(shape, generator, self._execution_device, model.dtype) if latents is None else latents
        x = x.to(self._execution_device, model.dtype)
        labels = torch.tensor(list(class_labels), device=x.device)
        self.scheduler.set_timesteps(sigmas=[1 - step / num for step in range(num)], device=x.device)
        for time, sigma in zip(self.scheduler.timesteps, self.scheduler.sigmas.tolist(), strict=False):
            velocity = self._velocity(x, sigma, labels, config.guidance if guidance_scale is None else guidance_scale)
            x = self.scheduler.step(velocity, time, x, generator=generator).prev_sample
        images = self._shown(x, output_type)
        return ImagePipelineOutput(images) if return_dict else (images,)

    def _velocity(self, x: torch.Tensor, sigma: float, labels: torch.Tensor, guidance: float) -> torch.Tensor:
        times = torch.full((len(x),), sigma * self.config.time_scale, device=x.device)
        found = self.transformer(x, times, labels).sample
        if guidance != 1:
            null = torch.full_like(labels, self.transformer.config.num_embeds_ada_norm)
            found = self.transformer(x, times, null).sample.lerp(found, guidance)
        return found if self.config.prediction == "velocity" else (x - found) / sigma

    def _shown(self, x: torch.Tensor, output_type: str) -> Any:
        if output_type == "latent":
            return x
        if self.vae is not None:
            config = self.vae.config
            x = self.vae.decode(x / config.scaling_factor + (getattr(config, "shift_factor", None) or 0)).sample
        return VaeImageProcessor().postprocess(x, output_type)
