// The torch engine's fused operators on CPUs. fused.py calls them, kernels.py compiles them at first use.
//
// Memory is as in pool.py: one layer's K and V are rows ((c * num_blocks + block) * num_kv_heads + head) of
// block_size * head_dim elements. Everything is computed in float32 and rounded once, when it is stored.
// Vectors are GCC's and Clang's own, threads OpenMP's: the library links no OpenMP of its own and so finds, at load, the
// one that torch has loaded, with its threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;  // wider vectors would be taken apart element by element
#endif
constexpr int64_t TOKENS_PER_PART = 512;     // of one context; the parts of a long one are read by several threads
constexpr int64_t MAX_HEAD_DIM = 256;
constexpr int64_t WORTH_A_THREAD = 1 << 14;  // elements

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));

struct BFloat16 {
    uint16_t bits;
};

inline float widen(float x) { return x; }

inline float widen(BFloat16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

inline void store(float x, float* to) { *to = x; }

// To the nearest, ties to even; NaN stays NaN.
inline void store(float x, BFloat16* to) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to->bits = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

template <class Vector, class T>
inline Vector read(const T* from) {
    Vector found;
    std::memcpy(&found, from, sizeof found);
    return found;
}

// 2 * LANES elements of a head in two vectors, in an order of their own: of bfloat16 the even ones and the odd ones,
// which costs a shift and a mask. place() says where an element of such a pair is; sums over a head need no order.
inline void load_pair(const float* from, Floats* pair) {
    pair[0] = read<Floats>(from);
    pair[1] = read<Floats>(from + LANES);
}

inline void load_pair(const BFloat16* from, Floats* pair) {
    const Words both = read<Words>(from);
    pair[0] = (Floats)(both << 16);
    pair[1] = (Floats)(both & 0xffff0000u);
}

inline void store_pair(const Floats* pair, float* to) { std::memcpy(to, pair, 2 * sizeof(Floats)); }

inline Words rounded(Floats x) {
    const Words bits = (Words)x;
    return (bits & 0x7fffffffu) > 0x7f800000u ? Words{} + 0x7fc00000u : bits + 0x7fffu + ((bits >> 16) & 1);
}

inline void store_pair(const Floats* pair, BFloat16* to) {
    const Words both = (rounded(pair[0]) >> 16) | (rounded(pair[1]) & 0xffff0000u);
    std::memcpy(to, &both, sizeof both);
}

inline int64_t place(int64_t element, const float*) { return element; }

inline int64_t place(int64_t element, const BFloat16*) {
    const int64_t in_pair = element % (2 * LANES);
    return element - in_pair + in_pair / 2 + (in_pair % 2) * LANES;
}

inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

// Lane l is x[l] + x[l ^ STEP], x being `a` where bit STEP of l is clear and `b` where it is set.
template <int STEP, int... L>
inline Floats fold(Floats a, Floats b, std::integer_sequence<int, L...>) {
    return SHUFFLE(a, b, ((L & STEP ? LANES : 0) + L)...) + SHUFFLE(a, b, ((L & STEP ? LANES : 0) + (L ^ STEP))...);
}

template <int STEP>
inline void fold_all(Floats* rows) {
    for (int i = 0; i < LANES; i += 2 * STEP)
        rows[i] = fold<STEP>(rows[i], rows[i + STEP], std::make_integer_sequence<int, LANES>());
}

// Lane i is the sum of rows[i] [LANES]; overwrites them.
inline Floats sums(Floats* rows) {
    fold_all<1>(rows);
    fold_all<2>(rows);
    fold_all<4>(rows);
    if constexpr (LANES > 8) fold_all<8>(rows);
    return rows[0];
}

inline float sum(Floats x) {
    float total = 0;
    for (int i = 0; i < LANES; ++i) total += x[i];
    return total;
}

// e^x for x <= 0, to 1e-7 of it; below -87 it is e^-87. NaN stays NaN.
inline Floats exp_of_negative(Floats x) {
    x = x < -87.0f ? Floats{} - 87.0f : x;
    const Ints n = __builtin_convertvector(x * 1.44269504f - 0.5f, Ints);
    const Floats whole = __builtin_convertvector(n, Floats);
    const Floats r = x - whole * 0.693145752f - whole * 1.42860677e-6f;
    Floats p = r * (1.0f / 720) + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * (Floats)((n + 127) << 23);
}

template <class T>
struct Reader {
    const T* queries;  // [num_seqs, query_stride], each [num_kv_heads, group, head_dim]
    int64_t query_stride;
    const T* keys;
    const T* values;
    int64_t num_kv_heads, group, block_size;
    float scale;
};

// A part of a sequence's context: tokens [first, last), for one K/V head.
struct Span {
    int64_t seq, head, first, last;
};

// What is needed to join a part with the others, for each query of the group: its top score, the total of the weights
// e^(score - top), and the values so weighted [group, head_dim], each in the order of load_pair.
struct Part {
    float *tops, *totals, *weighted;
};

// Write the scores [G, TOKENS_PER_PART] of `count` tokens, whose keys are neighbours [count, head_dim], for G queries.
template <class T, int N, int G>
void score(const T* queries, const T* keys, int64_t count, float scale, float* scores) {
    constexpr int64_t head_dim = 2 * N * LANES;
    Floats query[G][2 * N], rows[G][LANES];
    for (int g = 0; g < G; ++g)
        for (int i = 0; i < N; ++i) load_pair(queries + g * head_dim + 2 * i * LANES, query[g] + 2 * i);
    const auto multiply = [&](int64_t token, int row) {
        Floats total[G] = {}, key[2];
        for (int i = 0; i < N; ++i) {
            load_pair(keys + token * head_dim + 2 * i * LANES, key);
            for (int g = 0; g < G; ++g) {
                total[g] += query[g][2 * i] * key[0];
                total[g] += query[g][2 * i + 1] * key[1];
            }
        }
        for (int g = 0; g < G; ++g) rows[g][row] = total[g];
    };
    int64_t token = 0;
    for (; token + LANES <= count; token += LANES) {
        for (int i = 0; i < LANES; ++i) multiply(token + i, i);
        for (int g = 0; g < G; ++g) {
            const Floats found = sums(rows[g]) * scale;
            std::memcpy(scores + g * TOKENS_PER_PART + token, &found, sizeof found);
        }
    }
    for (; token < count; ++token) {
        multiply(token, 0);
        for (int g = 0; g < G; ++g) scores[g * TOKENS_PER_PART + token] = sum(rows[g][0]) * scale;
    }
}

// Add the values [count, head_dim], weighted, to the G sums in `weighted`.
template <class T, int N, int G>
void add_weighted(const float* weights, const T* values, int64_t count, float* weighted) {
    constexpr int64_t head_dim = 2 * N * LANES;
    Floats totals[G][2 * N], value[2];
    std::memcpy(totals, weighted, sizeof totals);
    for (int64_t token = 0; token < count; ++token) {
        for (int i = 0; i < N; ++i) {
            load_pair(values + token * head_dim + 2 * i * LANES, value);
            for (int g = 0; g < G; ++g) {
                totals[g][2 * i] += weights[g * TOKENS_PER_PART + token] * value[0];
                totals[g][2 * i + 1] += weights[g * TOKENS_PER_PART + token] * value[1];
            }
        }
    }
    std::memcpy(weighted, totals, sizeof totals);
}

// Call visit(g, tile) for tiles of the group that fit the CPU's registers; `tile` is a constant, their size.
template <int N, class Visit>
void each_tile(int64_t group, Visit visit) {
    constexpr int largest = N <= 2 ? 4 : N <= 4 ? 2 : 1;
    int64_t g = 0;
    for (; g + largest <= group; g += largest) visit(g, std::integral_constant<int, largest>());
    if (largest == 4 && g + 3 == group) return visit(g, std::integral_constant<int, 3>());
    for (; g < group; ++g) visit(g, std::integral_constant<int, 1>());
}

// Turn scores [count] into weights; `scores` has room for a multiple of LANES. Returns their top and total.
std::pair<float, float> weigh(float* scores, int64_t count) {
    const int64_t room = (count + LANES - 1) / LANES * LANES;
    std::fill(scores + count, scores + room, -std::numeric_limits<float>::infinity());
    Floats tops = read<Floats>(scores), totals = {};
    for (int64_t i = LANES; i < room; i += LANES) tops = maximum(tops, read<Floats>(scores + i));
    float top = tops[0];
    for (int i = 1; i < LANES; ++i) top = tops[i] > top ? tops[i] : top;
    for (int64_t i = 0; i < room; i += LANES) {
        const Floats weights = exp_of_negative(read<Floats>(scores + i) - top);
        totals += weights;
        std::memcpy(scores + i, &weights, sizeof weights);
    }
    return {top, sum(totals)};
}

// Read one part. `scores` [group, TOKENS_PER_PART] is scratch.
template <class T, int N>
void read_part(const Reader<T>& reader, const Span& span, const int32_t* table, float* scores, const Part& part) {
    constexpr int64_t head_dim = 2 * N * LANES;
    const int64_t size = reader.block_size;
    const T* queries = reader.queries + span.seq * reader.query_stride + span.head * reader.group * head_dim;
    const auto each_piece = [&](const T* rows, auto read_piece) {
        for (int64_t at = span.first; at < span.last;) {
            const int64_t block = at / size, last = std::min((block + 1) * size, span.last);
            const int64_t row = (table[block] * reader.num_kv_heads + span.head) * size + at % size;
            if (last < span.last) {
                const T* next = rows + (table[block + 1] * reader.num_kv_heads + span.head) * size * head_dim;
                for (int64_t i = 0; i < size * head_dim; i += 64 / sizeof(T)) __builtin_prefetch(next + i);
            }
            read_piece(rows + row * head_dim, at - span.first, last - at);
            at = last;
        }
    };
    each_piece(reader.keys, [&](const T* keys, int64_t offset, int64_t count) {
        each_tile<N>(reader.group, [&](int64_t g, auto tile) {
            score<T, N, tile>(queries + g * head_dim, keys, count, reader.scale, scores + g * TOKENS_PER_PART + offset);
        });
    });
    for (int64_t g = 0; g < reader.group; ++g)
        std::tie(part.tops[g], part.totals[g]) = weigh(scores + g * TOKENS_PER_PART, span.last - span.first);
    std::fill_n(part.weighted, reader.group * head_dim, 0.0f);
    each_piece(reader.values, [&](const T* values, int64_t offset, int64_t count) {
        each_tile<N>(reader.group, [&](int64_t g, auto tile) {
            const float* weights = scores + g * TOKENS_PER_PART + offset;
            add_weighted<T, N, tile>(weights, values, count, part.weighted + g * head_dim);
        });
    });
}

// Join one query's parts (every `stride`-th in [first, last)) and write the weighted mean of the values [head_dim].
template <class T>
void join_parts(const std::vector<Part>& parts, int64_t first, int64_t last, int64_t stride, int64_t g,
                int64_t head_dim, T* out) {
    float top = parts[first].tops[g], total = 0;
    for (int64_t p = first; p < last; p += stride) top = parts[p].tops[g] > top ? parts[p].tops[g] : top;
    std::vector<float> weighted(head_dim);
    for (int64_t p = first; p < last; p += stride) {
        const float weight = std::exp(parts[p].tops[g] - top);
        total += parts[p].totals[g] * weight;
        for (int64_t i = 0; i < head_dim; ++i) weighted[i] += parts[p].weighted[g * head_dim + i] * weight;
    }
    for (int64_t i = 0; i < head_dim; ++i) store(weighted[place(i, out)] / total, out + i);
}

template <class T, int head_dim>
void attend(const Reader<T>& reader, const int32_t* tables, int64_t table_width, const int64_t* firsts,
            const int64_t* lasts, int64_t num_seqs, T* out) {
    constexpr int N = head_dim / (2 * LANES);
    std::vector<Span> spans;
    std::vector<int64_t> first_spans;
    for (int64_t seq = 0; seq < num_seqs; ++seq) {
        first_spans.push_back(spans.size());
        for (int64_t at = firsts[seq]; at < lasts[seq]; at += TOKENS_PER_PART)
            for (int64_t head = 0; head < reader.num_kv_heads; ++head)
                spans.push_back({seq, head, at, std::min(at + TOKENS_PER_PART, lasts[seq])});
    }
    first_spans.push_back(spans.size());
    std::vector<float> memory(spans.size() * reader.group * (head_dim + 2));
    std::vector<Part> parts;
    for (size_t i = 0; i < spans.size(); ++i) {
        float* at = memory.data() + i * reader.group * (head_dim + 2);
        parts.push_back({at, at + reader.group, at + 2 * reader.group});
    }
    const int64_t num_heads = reader.num_kv_heads * reader.group;
#pragma omp parallel if (spans.size() > 1)
    {
        std::vector<float> scores(reader.group * TOKENS_PER_PART);
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < spans.size(); ++i)
            read_part<T, N>(reader, spans[i], tables + spans[i].seq * table_width, scores.data(), parts[i]);
#pragma omp for
        for (int64_t i = 0; i < num_seqs * num_heads; ++i) {
            const int64_t seq = i / num_heads, head = i % num_heads;
            join_parts(parts, first_spans[seq] + head / reader.group, first_spans[seq + 1], reader.num_kv_heads,
                       head % reader.group, head_dim, out + i * head_dim);
        }
    }
}

// Norm (with a weight) and turn one head; each pair (i, i + half) by its angle.
template <class T>
void rotate(const T* x, const T* norm, float eps, const float* cosines, const float* sines, int64_t half, T* out) {
    float wide[MAX_HEAD_DIM], turned[MAX_HEAD_DIM];
    float squares = 0;
    for (int64_t i = 0; i < 2 * half; ++i) wide[i] = widen(x[i]);
    if (norm) {
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < 2 * half; ++i) squares += wide[i] * wide[i];
        const float scale = 1.0f / std::sqrt(squares / (2 * half) + eps);
        for (int64_t i = 0; i < 2 * half; ++i) wide[i] *= scale * widen(norm[i]);
    }
    for (int64_t i = 0; i < half; ++i) {
        turned[i] = wide[i] * cosines[i] - wide[half + i] * sines[i];
        turned[half + i] = wide[half + i] * cosines[i] + wide[i] * sines[i];
    }
    for (int64_t i = 0; i < 2 * half; ++i) store(turned[i], out + i);
}

template <class T>
void rotate_and_store(T* qkv, const float* angles, const T* query_norm, const T* key_norm, float eps,
                      const int64_t* key_rows, T* keys, T* values, int64_t num_tokens, int64_t num_heads,
                      int64_t num_kv_heads, int64_t head_dim) {
    const int64_t half = head_dim / 2, width = (num_heads + 2 * num_kv_heads) * head_dim;
#pragma omp parallel for if (num_tokens * width > WORTH_A_THREAD)
    for (int64_t token = 0; token < num_tokens; ++token) {
        T* x = qkv + token * width;
        const float *cosines = angles + token * head_dim, *sines = cosines + half;
        for (int64_t head = 0; head < num_heads; ++head, x += head_dim)
            rotate(x, query_norm, eps, cosines, sines, half, x);
        for (int64_t head = 0; head < num_kv_heads; ++head, x += head_dim) {
            const int64_t at = key_rows[token * num_kv_heads + head] * head_dim;
            rotate(x, key_norm, eps, cosines, sines, half, keys + at);
            std::memcpy(values + at, x + num_kv_heads * head_dim, head_dim * sizeof(T));
        }
    }
}

template <class T>
void add_and_norm(T* hidden, const T* update, const T* weight, float eps, int64_t num_rows, int64_t size, T* out) {
#pragma omp parallel for if (num_rows * size > WORTH_A_THREAD)
    for (int64_t row = 0; row < num_rows; ++row) {
        T *x = hidden + row * size, *y = out + row * size;
        Floats squares = {}, pair[2], more[2];
        for (int64_t i = 0; i < size; i += 2 * LANES) {
            load_pair(x + i, pair);
            if (update) {
                load_pair(update + row * size + i, more);
                pair[0] += more[0];
                pair[1] += more[1];
                store_pair(pair, x + i);
                load_pair(x + i, pair);
            }
            squares += pair[0] * pair[0] + pair[1] * pair[1];
        }
        const float scale = 1.0f / std::sqrt(sum(squares) / size + eps);
        for (int64_t i = 0; i < size; i += 2 * LANES) {
            load_pair(x + i, pair);
            load_pair(weight + i, more);
            pair[0] *= more[0] * scale;
            pair[1] *= more[1] * scale;
            store_pair(pair, y + i);
        }
    }
}

// x * sigmoid(x)
inline Floats silu(Floats x) {
    const Floats small = exp_of_negative(x < 0.0f ? x : -x);
    return x * (x < 0.0f ? small : Floats{} + 1.0f) / (small + 1.0f);
}

template <class T>
void gate(const T* gate_up, int64_t num_rows, int64_t size, T* out) {
#pragma omp parallel for if (num_rows * size > WORTH_A_THREAD)
    for (int64_t row = 0; row < num_rows; ++row) {
        const T* gates = gate_up + row * 2 * size;
        for (int64_t i = 0; i < size; i += 2 * LANES) {
            Floats gate[2], up[2];
            load_pair(gates + i, gate);
            load_pair(gates + size + i, up);
            up[0] *= silu(gate[0]);
            up[1] *= silu(gate[1]);
            store_pair(up, out + row * size + i);
        }
    }
}

}  // namespace

// Each operator once a dtype; attend for the head_dims of fused.py.
#define OPERATORS(NAME, T)                                                                                            \
    extern "C" void attend_##NAME(const T* queries, int64_t query_stride, const T* block_rows, int64_t num_blocks,    \
                                  int64_t num_kv_heads, int64_t group, int64_t block_size, int64_t head_dim,          \
                                 float scale, const int32_t* tables, int64_t table_width, const int64_t* firsts,      \
                                 const int64_t* lasts, int64_t num_seqs, T* out) {                                    \
        const T* values = block_rows + num_blocks * num_kv_heads * block_size * head_dim;                             \
        const Reader<T> reader{queries, query_stride, block_rows, values, num_kv_heads, group, block_size, scale};    \
        switch (head_dim) {                                                                                           \
            case 32: return attend<T, 32>(reader, tables, table_width, firsts, lasts, num_seqs, out);                 \
            case 64: return attend<T, 64>(reader, tables, table_width, firsts, lasts, num_seqs, out);                 \
            case 96: return attend<T, 96>(reader, tables, table_width, firsts, lasts, num_seqs, out);                 \
            case 128: return attend<T, 128>(reader, tables, table_width, firsts, lasts, num_seqs, out);               \
            case 256: return attend<T, 256>(reader, tables, table_width, firsts, lasts, num_seqs, out);               \
        }                                                                                                             \
    }                                                                                                                 \
    extern "C" void rotate_and_store_##NAME(T* qkv, const float* angles, const T* query_norm, const T* key_norm,      \
                                            float eps, const int64_t* key_rows, T* keys, T* values,                   \
                                            int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads,              \
                                            int64_t head_dim) {                                                       \
        rotate_and_store(qkv, angles, query_norm, key_norm, eps, key_rows, keys, values, num_tokens, num_heads,       \
                         num_kv_heads, head_dim);                                                                     \
    }                                                                                                                 \
    extern "C" void add_and_norm_##NAME(T* hidden, const T* update, const T* weight, float eps, int64_t num_rows,     \
                                        int64_t size, T* out) {                                                       \
        add_and_norm(hidden, update, weight, eps, num_rows, size, out);                                               \
    }                                                                                                                 \
    extern "C" void gate_##NAME(const T* gate_up, int64_t num_rows, int64_t size, T* out) {                           \
        gate(gate_up, num_rows, size, out);                                                                           \
    }

OPERATORS(float32, float)
OPERATORS(bfloat16, BFloat16)
