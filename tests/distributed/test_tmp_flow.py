import pytest
from tests.distributed.agreement import check_updates
from tests.tiny import TINY_GAMES, both, stages, zero, tiny_recipe
from bigsgan.doctor.games import FLOW as G
def ds(z): return {"generator": zero(z)}
@pytest.mark.parametrize("num,more,z",[(1,[],0),(1,["accumulation=2"],0),(2,[],1),(2,["accumulation=2"],2),(2,["accumulation=2"],3),(2,["accumulation=2",*stages(2,1)],1),(2,["accumulation=2","engines.generator.activation_checkpointing=true"],3)])
def test_updates(ranks, num, more, z):
    check_updates(ranks(num), [*G,*more], ds(z), 3)
AE=["data.num_classes=0","generator={family: autoencoder, channels: 4, multipliers: [1, 2], num_blocks: 1, norm_groups: 2, latent_channels: 2}","discriminator={family: none}","objective={l1: 3, kl: 0.01}","optimizer={generator: {kind: sgd, lr: 0.1}}"]
@pytest.mark.parametrize("num,more,z",[(1,["accumulation=2"],0),(2,[],2),(2,["accumulation=2",*stages(2,1)],1),(2,[],3)])
def test_ae(ranks, num, more, z):
    check_updates(ranks(num), [*AE,*more], ds(z), 3)
