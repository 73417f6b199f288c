"""An engine of one's own asks a selector at every step. Run `replay_a_log.py` first: it trains one.

    .venv/bin/python docs/examples/own_engine.py

The engine's target knows a nursery rhyme by heart, and its drafter knows it but for the word "the".
A real engine has models in their places, and verifies a step's tokens in one forward pass.
"""

from data_gen import DrafterKnowledge
from selector import Sampling, load_selector

RHYME = (
    "this is the house that Jack built . this is the malt that lay in the house that Jack built . "
    "this is the rat that ate the malt that lay in the house that Jack built . this is the cat "
    "that killed the rat that ate the malt that lay in the house that Jack built . this is the dog "
    "that worried the cat that killed the rat that ate the malt that lay in the house"
)
TEXT = RHYME.split()
WORDS = sorted(set(TEXT))


def target(text: list[int]) -> int:
    """The token that follows a text."""
    return WORDS.index(TEXT[len(text)])


def drafter(text: list[int], length: int) -> list[int]:
    """The next tokens, of which some are wrong."""
    words = TEXT[len(text) : len(text) + length]
    return [WORDS.index(word.replace("the", "Jack")) for word in words]


selector = load_selector("runs/example/selector")
policy = selector.at(temperature=0.0, level="text")  # from token ids alone
text = [WORDS.index(word) for word in TEXT[:4]]  # the prompt
knowledge = DrafterKnowledge(text, Sampling(temperature=0.0), selector.tokens)

steps = 0
while len(text) < 70:
    action = policy.select(knowledge.features("text"))
    assert action is not None
    if action.copies:  # what followed the longest earlier match of the text's end
        drafted = knowledge.text.index.proposal(action.L1)
    else:
        drafted = drafter(text, action.L1)
    step: list[int] = []
    for token in drafted:
        if token != target(text + step):
            break
        step.append(token)
    accepted = len(step)
    step.append(target(text + step))
    text += step
    steps += 1
    knowledge.committed(step)
    way = "copied" if action.copies else "drafted"
    words = " ".join(WORDS[token] for token in step)
    print(f"{accepted:2} of {action.L1:2} {way}: {words}")

print(f"{len(text) - 4} words after {steps} steps")

# It prints:
#
#      5 of  5 drafted: that Jack built . this is
#     ...
#     ... words after ... steps
