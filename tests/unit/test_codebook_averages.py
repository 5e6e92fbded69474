"""Codes that follow averages, against a record of a public quantizer (tests/records/codebook.py)."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from bigsgan.adversarial.terms.codebook_averages import AveragedCodebook
from bigsgan.config.families.autoencoder import AutoencoderGenerator
from bigsgan.config.reconstruction import Codebook
from bigsgan.models.quantizers import VectorQuantizer
from bigsgan.monitor import Statistics
from tests.records.codebook import CHANNELS, CODES, COMMITMENT, DECAY, NAMES, PATH, SIDE

CPU = torch.device("cpu")


@pytest.mark.parametrize("is_normalized, name", NAMES.items())
def test_updates_are_those_of_a_public_quantizer(is_normalized, name):
    """Its outputs, loss, gradients at latents, counts and codes; normalized codes have its directions."""
    record = load_file(PATH)
    bottleneck = {"kind": "vq", "num_codes": CODES, "normalized": is_normalized, "ema": {"decay": DECAY}}
    section = AutoencoderGenerator(latent_channels=CHANNELS, bottleneck=bottleneck)
    quantizer, statistics = VectorQuantizer(section), Statistics(CPU)
    quantizer.codebook.copy_(record["codes"])
    sums = (lambda x: x,) * 2
    term = AveragedCodebook(Codebook(commitment=COMMITMENT), section, quantizer.codebook, sums, (0, 1), CPU)
    for update, latents in enumerate(record["latents"]):
        public = {
            key: record[f"{name}.{key}"][update] for key in ("made", "numbers", "loss", "gradient", "codes", "uses")
        }
        h = latents.clone().requires_grad_()
        made, encoded, codes, numbers = quantizer(h)
        loss = term.loss({"encoded": encoded, "quantized": codes, "codes": numbers}, statistics)
        (made.square().mean() + loss).backward()
        term.finish_update(update, True)
        assert torch.equal(numbers.view(-1, SIDE, SIDE), public["numbers"])
        found = F.normalize(quantizer.codebook, dim=1) if is_normalized else quantizer.codebook
        values = {"made": made, "loss": loss, "gradient": h.grad, "codes": found, "uses": term.state()["uses"]}
        for key, value in values.items():
            torch.testing.assert_close(
                value, public[key], rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
            )
