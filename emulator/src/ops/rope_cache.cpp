// Rotary embedding with angles from a cache. Each row of the cache belongs to a position, and
// contains [cos | sin].
#include "ops/bind.h"

using namespace emu;

// Returns the cosines and the sines, each as [tokens, 1, rotated / 2]. If there are several rows of
// positions (mrope), the columns are divided into sections, and each section uses the positions of
// one row.
static std::pair<Tensor, Tensor> angles(const Tensor &cache, const Tensor &positions,
                                        const Ints &sections) {
  Tensor rows = at::index_select(cache, 0, positions.reshape({-1})).to(at::kFloat);
  Tensor chosen = rows.view({-1, positions.size(-1), 2, cache.size(1) / 2});
  if (positions.dim() == 1) {
    chosen = chosen[0];
  } else {
    Tensors parts;
    int64_t begin = 0;
    for (size_t i = 0; i < sections.size(); begin += sections[i++])
      parts.push_back(chosen[i].narrow(-1, begin, sections[i]));
    chosen = at::cat(parts, -1);
  }
  return {chosen.slice(1, 0, 1), chosen.slice(1, 1, 2)};
}

static void rotate(const Tensor &x, const Tensor &cos, const Tensor &sin, int64_t head,
                   bool in_halves, const Tensor &out) {
  Tensor heads = x.to(at::kFloat).reshape({x.size(0), -1, head}), result = heads.clone();
  int64_t half = cos.size(-1);
  auto part = [&](const Tensor &t, int64_t which) {
    return in_halves ? t.narrow(-1, which * half, half) : t.slice(-1, which, 2 * half, 2);
  };
  Tensor a = part(heads, 0), b = part(heads, 1);
  part(result, 0).copy_(a * cos - b * sin);
  part(result, 1).copy_(b * cos + a * sin);
  out.copy_(result.view(out.sizes()));
}

static void check(const Tensor &positions, const Tensor &query, const Tensor &key,
                  const Tensor &cache, const Ints &sections, int64_t head) {
  require_kernel_type("the query", query);
  require_same_type("the key", key, query);
  require_same_type("the cache", cache, query);
  refuse_unless(query.dim() == 2 && key.dim() == 2 && cache.dim() == 2,
                "query, key and cache must be matrices, got ", query.sizes(), ", ", key.sizes(),
                " and ", cache.sizes());
  int64_t tokens = query.size(0), rotated = cache.size(1);
  refuse_unless(key.size(0) == tokens, "queries have ", tokens, " rows, keys ", key.size(0));
  refuse_unless(head > 0 && query.size(1) % head == 0 && key.size(1) % head == 0, "rows of ",
                query.size(1), " and ", key.size(1), " elements for heads of ", head);
  refuse_unless(rotated % 2 == 0 && rotated <= head, "rotated elements ", rotated,
                " of heads of ", head);
  bool one_row = positions.dim() == 1 && positions.size(0) == tokens;
  bool three_rows = positions.dim() == 2 && positions.size(0) == 3 && positions.size(1) == tokens;
  refuse_unless(one_row || three_rows, "positions must have ", tokens, " or [3, ", tokens,
                "] elements, got ", positions.sizes());
  refuse_unless(is_index(positions), "positions are ", positions.scalar_type());
  refuse_unless(one_row || (sections.size() == 3 &&
                            sections[0] + sections[1] + sections[2] == rotated / 2),
                "the sections of three rows of positions must have ", rotated / 2, " elements");
  demand(positions.scalar_type() == at::kLong, "positions must be int64");
  demand(tokens > 0, "empty tensors");
  int64_t unit = is_half(query) ? 32 : 16;
  demand(head % unit == 0 && rotated % unit == 0, "heads of ", head, " and ", rotated,
         " rotated elements: multiples of ", unit, " are needed");
  demand(one_row || sections == Ints{16, 24, 24}, "the sections must be 16, 24, 24");
}

// Rules: document and source of aclnnRopeWithSinCosCache (ops-transformer, posembedding). If there
// is only one row of positions, the sections are ignored.
OP(aclnnRopeWithSinCosCache,
   [](Tensor positions, Tensor query, Tensor key, Tensor cache, Ints sections, int64_t head,
      bool in_halves, Tensor query_out, Tensor key_out) -> Task {
     check(positions, query, key, cache, sections, head);
     return arithmetic([=] {
       AtenScope scope;
       auto [cos, sin] = angles(cache, positions, sections);
       rotate(query, cos, sin, head, in_halves, query_out);
       rotate(key, cos, sin, head, in_halves, key_out);
     });
   })
