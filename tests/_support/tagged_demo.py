"""The demo model with tokens for the tags of the reasoning."""

import json
import shutil

from atomc.demo import PATH

OPEN, CLOSE = 3070, 3071  # of the demo's last two merges


def tagged_demo(folder):
    """A copy of the demo in which these tokens are <think> and </think>, and whose chat template
    opens the reasoning.
    """
    shutil.copytree(PATH, folder, ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    model = tokenizer["model"]
    texts = {number: text for text, number in model["vocab"].items()}
    for number, tag in ((OPEN, "<think>"), (CLOSE, "</think>")):
        del model["vocab"][texts[number]]
        model["vocab"][tag] = number
        added = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        tokenizer["added_tokens"].append({"id": number, "content": tag, **added})
    del model["merges"][-2:]
    file.write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}\n{% endfor %}<think>\n"
    )
    return folder
