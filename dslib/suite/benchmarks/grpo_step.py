"""One GRPO step, generation included, beside that of TRL: the same model, prompts, group and completion lengths."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dslib.models.decoder import Decoder, DecoderConfig
from dslib.rl import RLConfig, Trainer
from dslib.suite.benchmarks import print_table

STEPS, WARMUP = 9, 2
GOAL = 0.5
LR = 1e-5

NOTES = """float32 on a CPU, AdamW, no KL term, one update a batch, temperature 1; all completions are
of full length. TRL: GRPOTrainer of trl {trl} on transformers' LlamaForCausalLM with the same weights.
A step of TRL is what lies between its callbacks on_step_begin and on_step_end; after each, one of ours is timed.
Its data loader and its logging, which this leaves out, come on top."""


@dataclass(frozen=True)
class Setting:
    """A model, and what a step of it samples."""

    model: DecoderConfig
    prompts: int
    group_size: int
    prompt_length: int
    new_tokens: int

    @property
    def task(self) -> EvenTokens:
        """The problems, in the model's vocabulary."""
        return EvenTokens(self.model.vocab_size, self.prompt_length, self.new_tokens)

    def __str__(self) -> str:
        sizes = f"{self.model.d_model} × {self.model.layers}, vocabulary {self.model.vocab_size}"
        return f"{sizes}; {self.prompts} × {self.group_size}; {self.prompt_length} + {self.new_tokens} tokens"


#: Countdown as the notebooks train it, and completions that are longer than the prompt.
SETTINGS = (
    Setting(DecoderConfig(vocab_size=40, d_model=96, layers=3, heads=4), 32, 16, 10, 9),
    Setting(DecoderConfig(vocab_size=512, d_model=128, layers=4, heads=4), 8, 8, 32, 64),
)


@dataclass(frozen=True)
class EvenTokens:
    """Random prompts; the reward is the share of even tokens, so that hardly two completions earn the same and every
    one of them is trained on. A completion never ends before ``max_new_tokens``."""

    vocab_size: int
    prompt_length: int
    max_new_tokens: int
    count: int = 256
    end: None = None

    def __len__(self) -> int:
        return self.count

    def problem(self, index: int) -> Tensor:
        """The prompt."""
        return self.prompts([index])[0]

    def prompts(self, indices: Any) -> Tensor:
        """(n, prompt_length) int64; token 0 stands for padding elsewhere and never occurs."""
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(1, self.vocab_size, (self.count, self.prompt_length), generator=generator)
        return drawn[torch.as_tensor(indices)]

    def rewards(self, indices: Any, completions: Tensor, mask: Tensor) -> Tensor:
        """The share of even tokens: (n,) float32."""
        return ((completions % 2 == 0) & mask).sum(1) / mask.sum(1)


def main() -> None:
    """Measure and print the table; a missed goal is printed like a reached one. Needs ``trl``, extra ``bench``."""
    try:
        import trl
    except ImportError as error:
        raise SystemExit(
            f"dslib bench grpo_step needs trl ({error}): pip install 'dslib-notebooks[bench]'"
        ) from None
    rows: list[list] = []
    try:
        for setting in SETTINGS:
            rows += _rows(setting)
            print(f"measured {setting}", file=sys.stderr)
    finally:
        where = f"{torch.get_num_threads()} threads, torch {torch.__version__}"
        columns = ["width × layers; prompts × group", "", "median s", "min–max", "n", "of trl", "goal"]
        print_table(f"A GRPO step, {where}", columns, rows)
    print(NOTES.format(trl=trl.__version__))


def _rows(setting: Setting) -> list[list]:
    decoder = setting.model.build(0)
    peer = as_llama(decoder, setting.prompt_length + setting.new_tokens)
    check(decoder, peer)
    ours, theirs = measure(setting, decoder, peer)
    rows = []
    for name, seconds in (("trl", theirs), ("dslib", ours)):
        median = statistics.median(seconds)
        share = median / statistics.median(theirs)
        verdict = f"≤ {GOAL} {'reached' if share <= GOAL else 'missed'}" if name == "dslib" else ""
        spread = f"{min(seconds):.3f}–{max(seconds):.3f}"
        rows.append([str(setting), name, f"{median:.3f}", spread, len(seconds), f"{share:.3f}", verdict])
    return rows


def as_llama(decoder: Decoder, length: int) -> nn.Module:
    """transformers' Llama with the sizes and weights of ``decoder``, for sequences of ``length``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = decoder.config
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=config.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads or config.heads,
            max_position_embeddings=length,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_base},
            tie_word_embeddings=config.tie_embeddings,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    names = {
        "embedding.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "lm_head.weight": "lm_head.weight",
    }
    parts = {
        "attention_norm": "input_layernorm",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.output": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    }
    for layer in range(config.layers):
        names |= {f"blocks.{layer}.{a}.weight": f"model.layers.{layer}.{b}.weight" for a, b in parts.items()}
    weights = {names[name]: weight.detach().clone() for name, weight in decoder.state_dict().items()}
    llama.load_state_dict(weights)
    return llama


@torch.no_grad()
def check(decoder: Decoder, llama: nn.Module) -> None:
    """Raise AssertionError unless both models have the same logits."""
    tokens = torch.randint(1, decoder.config.vocab_size, (3, 20), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(llama(tokens).logits, decoder(tokens), rtol=1e-3, atol=1e-4)


def measure(
    setting: Setting, decoder: Decoder, llama: nn.Module, steps: int = STEPS, warmup: int = WARMUP
) -> tuple[list[float], list[float]]:
    """Seconds of each step, ours and TRL's, in turns; the first ``warmup`` of each are left out."""
    config = RLConfig("grpo", prompts=setting.prompts, group_size=setting.group_size, lr=LR)
    trainer = Trainer(decoder, setting.task, config)
    ours: list[float] = []
    theirs: list[float] = []

    def one_of_ours(seconds: float) -> None:
        theirs.append(seconds)
        before = time.perf_counter()
        trainer.step()
        ours.append(time.perf_counter() - before)

    with tempfile.TemporaryDirectory() as folder:
        peer_trainer(llama, setting, folder, warmup + steps, one_of_ours).train()
    return ours[warmup:], theirs[warmup:]


def peer_trainer(
    llama: nn.Module, setting: Setting, folder: str, steps: int, after_step: Callable[[float], None]
) -> Any:
    """TRL's trainer on the setting's task; ``after_step(seconds)`` is called when a step of it is done."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    task = setting.task
    words = Tokenizer(models.WordLevel({str(i): i for i in range(task.vocab_size)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # Token 0 pads and ends; min_new_tokens keeps a completion from ending early.
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="0")
    texts = [" ".join(map(str, prompt)) for prompt in task.prompts(range(len(task))).tolist()]

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(token % 2 == 0 for token in row) / len(row) for row in completion_ids]

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            after_step(time.perf_counter() - self.started)

    config = GRPOConfig(
        output_dir=folder,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=setting.prompts * setting.group_size,
        num_generations=setting.group_size,
        max_completion_length=task.max_new_tokens,
        generation_kwargs={"min_new_tokens": task.max_new_tokens},
        learning_rate=LR,
        lr_scheduler_type="constant",
        beta=0.0,
        loss_type="grpo",
        max_steps=steps,
        bf16=False,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=llama,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.remove_callback(PrinterCallback)  # our table is what is printed
    return trainer
