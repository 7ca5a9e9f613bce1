"""What a user of accelerate writes: a tiny Llama with random weights in a loop of their own, and the ds_config by its path.

    torchrun --nproc_per_node N accelerate_script.py DS_CONFIG FOLDER [STATE]

The state in the middle goes to FOLDER/state, the weights at the end to FOLDER/last.
"""

import os
import sys

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DataLoaderConfiguration, DummyOptim, DummyScheduler, InitProcessGroupKwargs, set_seed
from transformers import AutoModelForCausalLM, LlamaConfig

UPDATES, SAVE_AFTER, VOCABULARY, LENGTH = 8, 4, 61, 16


class Sequences(torch.utils.data.Dataset):
    """Sequences of tokens that go up in steps of their own."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        return (index + (1 + index % 5) * torch.arange(LENGTH)) % VOCABULARY


class Progress:
    """Microbatches trained; saved with the state."""

    def __init__(self):
        self.microbatches = 0

    def state_dict(self):
        return {"microbatches": self.microbatches}

    def load_state_dict(self, state):
        self.microbatches = state["microbatches"]


def parameter_groups(model):
    vectors = [p for name, p in model.named_parameters() if "norm" in name]
    matrices = [p for name, p in model.named_parameters() if "norm" not in name]
    return [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]


def main(ds_config, folder, state=None):
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ds_config),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],  # without it, accelerate sees one process where there is no GPU
    )
    set_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    accelerator.print("partitioned:", all(hasattr(p, "ds_shape") for p in model.parameters()))  # by zero.Init, before the engine is built
    optimizer = DummyOptim(parameter_groups(model), lr=1e-2)
    scheduler = DummyScheduler(optimizer, total_num_steps=UPDATES * accelerator.num_processes, warmup_num_steps=2)
    loader = torch.utils.data.DataLoader(Sequences(), batch_size=2, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.print("optimizer:", type(model.basic_optimizer).__name__, "in", type(model.optimizer).__name__)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if state:
        accelerator.load_state(state)

    while model.global_steps < UPDATES:
        epoch, done = divmod(progress.microbatches, len(loader))
        loader.set_epoch(epoch)
        for tokens in accelerator.skip_first_batches(loader, done):
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            progress.microbatches += 1
            if accelerator.sync_gradients:
                accelerator.print(f"update {model.global_steps}: loss {accelerator.gather(loss.detach()).mean().item():.4f}")
                if model.global_steps == SAVE_AFTER:
                    accelerator.save_state(os.path.join(folder, "state"))
                if model.global_steps == UPDATES:
                    break
    accelerator.save_model(model, os.path.join(folder, "last"))
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
