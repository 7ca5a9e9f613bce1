"""What a user of Hugging Face's Trainer writes: a tiny GPT-2 with random weights and dropout, and the ds_config by its path.

    torchrun --nproc_per_node N trainer_script.py DS_CONFIG FOLDER [CHECKPOINT]

Checkpoints go to FOLDER, the weights at the end to FOLDER/last.
"""

import os
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

UPDATES, SAVE_AFTER, VOCABULARY, LENGTH = 8, 4, 61, 16


class Sequences(torch.utils.data.Dataset):
    """Sequences of tokens that go up in steps of their own."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        tokens = (index + (1 + index % 5) * torch.arange(LENGTH)) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def main(ds_config, folder, checkpoint=None):
    arguments = TrainingArguments(
        output_dir=folder,
        deepspeed=ds_config,
        max_steps=UPDATES,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        adam_beta2=0.99,
        weight_decay=0.01,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        max_grad_norm=0.5,
        save_steps=SAVE_AFTER,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
    )
    set_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=24, n_layer=2, n_head=3, bos_token_id=0, eos_token_id=0)
    trainer = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=Sequences())
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(os.path.join(folder, "last"))
    if trainer.is_world_process_zero():
        engine = trainer.deepspeed
        print("optimizer:", type(engine.basic_optimizer).__name__, "in", type(engine.optimizer).__name__)


if __name__ == "__main__":
    main(*sys.argv[1:])
