"""What is said when Gloo reports that a message cannot arrive: who the other end is, and whether it has ended or only does not answer."""

import pytest
import torch
import torch.distributed as dist

from ds_basisrot.pipeline.channels import TIED, Channel, is_of_gloo

CLOSED = "[/build/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242. Look there."
LATE = "[/build/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete"


class Faulty:
    def __init__(self, text):
        self.text = text

    def wait(self):
        raise RuntimeError(self.text)


@pytest.fixture(scope="module")
def channel():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Channel(0, 3, 0, dist.group.WORLD, TIED, torch.device("cpu"))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (CLOSED, ["stage 0 lost its connection to stage 3 (rank 0)", "has ended", "(Connection closed by peer [127.0.0.1]:4242)"]),
        (LATE, ["stage 0 has waited too long for stage 3 (rank 0)", "is doing (Timed out waiting 5000ms"]),
    ],
)
def test_the_other_end_is_named_and_what_became_of_it(channel, text, words):
    with pytest.raises(RuntimeError) as error:
        channel.wait(Faulty(text))
    assert all(word in str(error.value) for word in words), str(error.value)
    assert ("has ended" in str(error.value)) is (text is CLOSED)


def test_errors_of_others_are_not_taken_for_gloo_s():
    assert is_of_gloo(RuntimeError(CLOSED)) and is_of_gloo(RuntimeError(LATE))
    for text in ("user: Broken pipe", "[gpu 3] Read error in gloo/", "", "stage 1 lost its connection (by peer)"):
        assert not is_of_gloo(RuntimeError(text)), text
