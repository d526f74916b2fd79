"""A step of sparse latent attention: requests in a paged cache, and calls of the two operators that
choose keys and attend to these keys.
"""

import torch
import torch_npu

INDEX, LATENT, ROPE, TILE = 128, 512, 64, 128
SCALE = 192**-0.5
LENGTHS, QUERIES = (40, 5, 17), (3, 1, 16)  # keys and query rows of each request


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


class Step:
    """Requests with random rows in the pages of a cache. All other rows of the cache are NaN."""

    def __init__(
        self,
        dtype=torch.bfloat16,
        heads=4,
        index_heads=8,
        block_size=16,
        key_lengths=LENGTHS,
        queries=QUERIES,
    ):
        self.key_lengths, self.queries = key_lengths, queries
        self.rows = sum(queries)
        columns = max(-(-n // block_size) for n in key_lengths) + 1
        count = len(key_lengths) * columns + 2
        order = torch.randperm(count)[: len(key_lengths) * columns]
        self.table = order.view(len(key_lengths), columns).to(torch.int32)
        widths = {"index": INDEX, "latent": LATENT, "rope": ROPE}
        self.tokens = {
            name: [torch.randn(n, width).to(dtype) for n in key_lengths]
            for name, width in widths.items()
        }
        self.pages = {
            name: torch.full((count, block_size, 1, width), float("nan"), dtype=dtype)
            for name, width in widths.items()
        }
        for name, pages in self.pages.items():
            for table, tokens in zip(self.table.long(), self.tokens[name], strict=True):
                at = table.repeat_interleave(block_size) * block_size
                at = (at + torch.arange(block_size).repeat(columns))[: len(tokens)]
                pages.view(-1, pages.shape[-1])[at] = tokens
        self.query = torch.randn(self.rows, heads, LATENT).to(dtype)
        self.query_rope = torch.randn(self.rows, heads, ROPE).to(dtype)
        self.index_query = torch.randn(self.rows, index_heads, INDEX).to(dtype)
        self.weights = torch.rand(self.rows, index_heads).to(dtype)
        self.lengths = {"ends": ints(*queries).cumsum(0).int(), "keys": ints(*key_lengths)}

    def upload(self):
        """Move all tensors to the device, so that calls copy nothing."""
        for name in ("table", "query", "query_rope", "index_query", "weights"):
            setattr(self, name, getattr(self, name).npu())
        self.pages, self.lengths = on_device(self.pages), on_device(self.lengths)

    def each_row(self):
        """Yield (row, request, number of keys to which the row may attend)."""
        row = 0
        for request, (queries, length) in enumerate(
            zip(self.queries, self.key_lengths, strict=True)
        ):
            for i in range(queries):
                yield row, request, length - queries + i + 1
                row += 1

    def choose(self, count, **changes):
        options = {
            "query": self.index_query,
            "key": self.pages["index"],
            "weights": self.weights,
            "actual_seq_lengths_query": self.lengths["ends"],
            "actual_seq_lengths_key": self.lengths["keys"],
            "block_table": self.table,
            "layout_query": "TND",
            "layout_key": "PA_BSND",
            "sparse_count": count,
            "sparse_mode": 3,
        } | changes
        return torch_npu.npu_lightning_indexer(**on_device(options))[0]

    def pack(self):
        """Return the latents and rotated keys of all pages as rows of int8. A row contains 512
        values, the rotated key, and one scale for each 128 values.
        """
        latents = self.pages["latent"].float().unflatten(-1, (-1, TILE))
        scales = latents.nan_to_num().abs().amax(-1) / 127
        values = (
            (latents.nan_to_num() / scales.clamp(min=1e-30).unsqueeze(-1)).round().to(torch.int8)
        )
        parts = (values.flatten(-2), self.pages["rope"], scales)
        return torch.cat([part.contiguous().view(torch.int8) for part in parts], -1)

    def attend_to_packed(self, chosen, rows, **changes):
        options = {
            "query": torch.cat([self.query, self.query_rope], -1),
            "key": rows,
            "sparse_indices": chosen,
            "scale_value": SCALE,
            "key_quant_mode": 2,
            "value_quant_mode": 2,
            "block_table": self.table,
            "actual_seq_lengths_query": self.lengths["ends"],
            "actual_seq_lengths_kv": self.lengths["keys"],
            "layout_query": "TND",
            "layout_kv": "PA_BSND",
            "attention_mode": 2,
        } | changes
        options = on_device(options)
        options.setdefault("value", options["key"])
        return torch_npu.npu_kv_quant_sparse_flash_attention(**options)

    def attend_to_all(self, chosen, keys, kv_ends, **changes):
        """Attend to keys that are not paged (layout TND); return the result, and for each row its
        greatest score and its sum of exponentials.
        """
        options = {
            "key": keys["latent"],
            "key_rope": keys["rope"],
            "actual_seq_lengths_kv": kv_ends,
            "block_table": None,
            "layout_kv": "TND",
            "return_softmax_lse": True,
        } | changes
        return self._attend(chosen, **options)

    def attend(self, chosen, **changes):
        return self._attend(chosen, **changes)[0]

    def _attend(self, chosen, **changes):
        options = {
            "query": self.query,
            "key": self.pages["latent"],
            "sparse_indices": chosen,
            "scale_value": SCALE,
            "block_table": self.table,
            "actual_seq_lengths_query": self.lengths["ends"],
            "actual_seq_lengths_kv": self.lengths["keys"],
            "query_rope": self.query_rope,
            "key_rope": self.pages["rope"],
            "layout_query": "TND",
            "layout_kv": "PA_BSND",
            "sparse_mode": 3,
            "attention_mode": 2,
        } | changes
        options = on_device(options)
        options.setdefault("value", options["key"])
        return torch_npu.npu_sparse_flash_attention(**options)


def on_device(options):
    return {k: v.npu() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
