"""Answer prompts in one process: ``python examples/generate.py [configs/x.yaml]``."""

import sys

from dist_aclgraph import LLM, SamplingParams

config = sys.argv[1] if len(sys.argv) > 1 else "configs/tiny-qwen3.yaml"

if __name__ == "__main__":
    with LLM(config) as llm:
        questions = ["Count from 3 to 9.", "Tell me a story about a fox in the forest."]
        prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": q}]) for q in questions]
        answers = llm.generate(prompts, SamplingParams(max_tokens=24, temperature=0.0))
        for question, answer in zip(questions, answers, strict=True):
            print(f"{question!r} -> {answer.text!r} ({answer.finish_reason})")
        print("graph plan:", llm.report()["plan"]["families"])
