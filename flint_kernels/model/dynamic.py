"""For torch.compile: one graph for every number of rows and requests."""

from __future__ import annotations

from torch import Tensor

from flint_kernels.model.batch import Batch, PrefillBatch


def mark_any_size(input_ids: Tensor, batch: Batch) -> None:
    """Makes `torch.compile(model, dynamic=True)` assume nothing of a step's sizes, 1 included.

    Without it torch compiles once for one row or request and once more for several. It says
    something to the compilation that these tensors bring about, and changes neither them nor what
    is computed; marking every step is as good as marking the first.

    `max_query_len` of a PrefillBatch is a number and no size: a graph is made for each value. Give
    all steps the largest, `batch._replace(max_query_len=512)` for chunks of up to 512 tokens.

    Args:
        input_ids: [T], those of the step.
        batch: its plan.
    """
    from torch._dynamo.decorators import mark_unbacked as mark  # slow to import, and few compile

    if not isinstance(batch, PrefillBatch):
        for tensor in (input_ids, *batch):
            mark(tensor, 0, shape_id="requests")
        return
    for tensor in (input_ids, batch.positions, batch.slots, batch.window_slots):
        mark(tensor, 0, shape_id="rows")
    tables = (batch.block_table, batch.window_block_table)
    for tensor in (*tables, batch.seq_lens, batch.context_lens):
        mark(tensor, 0, shape_id="requests")
    mark(batch.cu_seqlens, 0)
    mark(batch.last_rows, 0)
