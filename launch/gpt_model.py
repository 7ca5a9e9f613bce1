"""A decoder-only GPT as a list of pipeline layers: embedding, pre-norm blocks, output head."""

from deepspeed.pipe import LayerSpec, PipelineModule

from ds_basisrot.bench.tiny_gpt import Block, Embedding, Head, next_byte_loss


def layer_specs(vocabulary: int, layers: int, width: int, heads: int, context: int, seed: int) -> list[LayerSpec]:
    """The model's layers + 2 pipeline layers.

    Each draws from a generator of its own, so a weight starts the same in whichever stage and process it is built.
    """
    seeds = [1_000_003 * seed + index for index in range(layers + 2)]
    blocks = [LayerSpec(Block, width, heads, layers, seeds[1 + index]) for index in range(layers)]
    return [LayerSpec(Embedding, vocabulary, width, context, seeds[0]), *blocks, LayerSpec(Head, vocabulary, width, seeds[-1])]


def pipeline(stages: int, **shape: int) -> PipelineModule:
    """The model cut into `stages`; `shape` is what `layer_specs` takes.

    Cut by the number of blocks, not of parameters: blocks are equal and hold nearly all the work, whereas an embedding has
    many parameters and next to no work, so counting parameters would give its stage too few blocks.
    """
    return PipelineModule(layer_specs(**shape), num_stages=stages, loss_fn=next_byte_loss, partition_method="type:Block")
