"""Answer prompts in one process: ``python examples/generate.py [MODEL or configs/x.yaml]``."""

import sys

from dist_aclgraph import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "configs/tiny-qwen3.yaml"

if __name__ == "__main__":
    with LLM(model) as llm:
        questions = ["Count from 3 to 9.", "Tell me a story about a fox in the forest."]
        conversations = [[{"role": "user", "content": question}] for question in questions]
        answers = llm.chat(conversations, SamplingParams(max_tokens=24, temperature=0.0))
        for question, answer in zip(questions, answers, strict=True):
            output = answer.outputs[0]
            print(f"{question!r} -> {output.text!r} ({output.finish_reason})")
        print("graph plan:", llm.report()["plan"]["families"])
