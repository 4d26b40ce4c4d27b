"""Bugs in how a model is cut into stages, and in what these send each other."""

from mutations import Bug

STAGES = "tests/parallel/test_stages.py"
PIPELINE = "tests/runtime/ranks/test_pipeline.py -k outputs_of_one_process"

BUGS = [
    # A class that scales its embeddings would scale the received states, too.
    Bug(
        "atomc/parallel/stages.py",
        'for name in (embedding, f"{frame.layers}.{own_layers.start - 1}"):',
        "for name in (embedding,):",
        f"{STAGES} -k scaled",
    ),
    # A class that scales its logits would scale the sent states, too.
    Bug(
        "atomc/parallel/stages.py",
        "out = self.sent[0].flatten(0, -2)",
        "pass",
        f"{STAGES} -k scaled",
    ),
    Bug(
        "atomc/parallel/stages.py",
        "{first: names[0] for first, names in first_names.items()},",
        "{},",
        f"{STAGES} -k random_weights",
    ),
    Bug(
        "atomc/parallel/stages.py",
        "return moved | of_stage",
        "return of_stage",
        f"{STAGES} -k tied",
    ),
    Bug(
        "runtime/execution/micro_batches.py",
        "start=chunk.start + start,",
        "",
        f"{STAGES} -k micro_batches",
    ),
    Bug(
        "runtime/execution/micro_batches.py",
        "chunk.blocks if start == 0 else tuple((0, ()) for _ in chunk.blocks)",
        "chunk.blocks",
        f"{STAGES} -k micro_batches",
    ),
    Bug(
        "runtime/execution/block_groups.py",
        "tuple(chunk.blocks[i] for i in self.own)",
        "chunk.blocks",
        f"{STAGES} -k own_groups",
    ),
    Bug("runtime/execution/runner.py", "self.input_batch.keep_tokens(*expected)", "pass", PIPELINE),
]
