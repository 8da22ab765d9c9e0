// Tokens from logits: the choice that ingle_graph::sample defines. Grid: rows of the bucket; a block chooses one row's token.
//
// A token's place in the order is a number: value descending in its upper half, id in its lower. Top-k, top-p and the draw
// each ask for the first place, in this order, at which a count of tokens or a sum of weights is reached. Where few tokens
// can be chosen, they are sorted, and the place is seen. Else they are counted into bins of places; the bin that holds the
// one that is sought is cut into smaller bins, until its tokens can be sorted. Sums are integers, so their order is free.
#include "overlap.cuh"

#define THREADS 1024u
#define WARPS (THREADS / 32)
#define SPAN 1024u // logits of a peak
#define ROOM 1024u // tokens that are sorted
#define BINS 1024u
#define BIN_BITS 10u
#define CHANGES 1024u
#define ONE (1ull << 43)

// What a row gets that is left to the host (ingle_graph::sample::Chosen).
#define UNASKED -1.0f
#define HAS_NAN -2.0f
#define NOTHING -3.0f

// Counts and sums of weights of sorted tokens, or of bins: of each alone, and then up to and with it.
struct Tally {
    u64 sums[BINS];
    u32 counts[BINS];
};

struct Shared {
    u64 places[ROOM];
    Tally tally, first;
    float peaks[THREADS];
    u32 changed[CHANGES];
    float changed_to[CHANGES];
    u32 parts[WARPS];
    u32 taken, found;
};

struct Row {
    const float* logits;
    u32 cols, spans, changes;
    // Of the likeliest token: its logit, and that as a number of the order.
    float largest;
    u32 top;
    // No token below it can be chosen.
    float low;
    float temperature;
    double least_weight;
};

// ---- The order.

static __device__ __forceinline__ u32 descending(float value) {
    u32 b = bits(add(value, 0.0f));
    return ~(b >> 31 ? ~b : b | 0x80000000u);
}

static __device__ __forceinline__ float value_of(u32 descending) {
    u32 ascending = ~descending;
    return from_bits(ascending >> 31 ? ascending ^ 0x80000000u : ~ascending);
}

static __device__ __forceinline__ u64 place_of(const Row& row, float value, u32 id) {
    return (u64)(descending(value) - row.top) << 32 | id;
}

static __device__ __forceinline__ u64 weight_of(const Row& row, float value) {
    if (value == row.largest) return ONE;
    float e = contract_exp(quotient(sub(value, row.largest), row.temperature));
    return (u64)rintf(mul(e, (float)ONE));
}

// The smallest of a block's numbers, for every thread.
static __device__ u32 smallest_of_block(Shared& s, u32 x) {
    u32 lane = threadIdx.x % 32;
    for (u32 other = 16; other > 0; other /= 2) {
        u32 y = __shfl_xor_sync(FULL, x, other);
        x = y < x ? y : x;
    }
    __syncthreads();
    if (lane == 0) s.parts[threadIdx.x / 32] = x;
    __syncthreads();
    x = s.parts[lane];
    for (u32 other = 16; other > 0; other /= 2) {
        u32 y = __shfl_xor_sync(FULL, x, other);
        x = y < x ? y : x;
    }
    return x;
}

// ---- Logits, some of which are changed.

// The first change of a token from `id` on.
static __device__ __forceinline__ u32 first_change(const Shared& s, u32 changes, u32 id) {
    u32 from = 0, to = changes;
    while (from < to) {
        u32 middle = (from + to) / 2;
        if (s.changed[middle] < id) from = middle + 1;
        else to = middle;
    }
    return from;
}

// Of the tokens `first + 32 * i + lane`, those that are changed: bit i.
static __device__ __forceinline__ u32 changes_of_lane(const Shared& s, u32 changes, u32 first) {
    u32 mask = 0;
    for (u32 i = first_change(s, changes, first); i < changes && s.changed[i] < first + SPAN; i++) {
        u32 at = s.changed[i] - first;
        if (at % 32 == threadIdx.x % 32) mask |= 1u << at / 32;
    }
    return mask;
}

// The peaks of spans with changes.
static __device__ void change_peaks(const Row& row, Shared& s) {
    u32 lane = threadIdx.x % 32;
    for (u32 span = threadIdx.x / 32; span < row.spans; span += WARPS) {
        u32 first = span * SPAN, i = first_change(s, row.changes, first);
        if (i == row.changes || s.changed[i] >= first + SPAN) continue;
        u32 mask = changes_of_lane(s, row.changes, first);
        float peak = negated(INFINITE);
        for (u32 k = 0; k < SPAN / 32; k++) {
            u32 id = first + 32 * k + lane;
            if (id < row.cols && !(mask >> k & 1)) peak = larger(peak, row.logits[id]);
        }
        peak = larger32(peak);
        for (; i < row.changes && s.changed[i] < first + SPAN; i++) peak = larger(peak, s.changed_to[i]);
        if (lane == 0) s.peaks[span] = peak;
    }
}

// Calls `take(value, id)` for every token from `low` on, unless `is_full()`.
template <typename Take, typename Full>
static __device__ __forceinline__ void each_token(const Row& row, const Shared& s, float low, const Take& take,
                                                  const Full& is_full) {
    for (u32 span = threadIdx.x / 32; span < row.spans; span += WARPS) {
        if (!(s.peaks[span] >= low) || is_full()) continue;
        u32 first = span * SPAN + threadIdx.x % 32;
        u32 mask = row.changes ? changes_of_lane(s, row.changes, span * SPAN) : 0;
        for (u32 k = 0; k < SPAN / 32; k += 4) {
            float x[4];
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                u32 id = first + 32 * (k + j);
                x[j] = id < row.cols ? row.logits[id] : NOT_A_NUMBER;
            }
#pragma unroll
            for (u32 j = 0; j < 4; j++)
                if (x[j] >= low && !(mask >> (k + j) & 1)) take(x[j], first + 32 * (k + j));
        }
    }
    u32 i = threadIdx.x;
    if (i < row.changes && s.changed_to[i] >= low) take(s.changed_to[i], s.changed[i]);
}

// Whether min-p keeps a token.
static __device__ __forceinline__ bool is_kept(const Row& row, float value) {
    return value == row.largest || row.least_weight == 0.0 || (double)weight_of(row, value) >= row.least_weight;
}

// The lowest value in the `size` places from `from` on.
static __device__ __forceinline__ float lowest(const Row& row, u64 from, u64 size) {
    u32 end = (u32)((from + (size - 1)) >> 32), most = descending(row.low) - row.top;
    return value_of(row.top + (end < most ? end : most));
}

// ---- Tallies.

// Each of the first `n`, a power of two, with those before it.
static __device__ void add_up(Tally& tally, u32 n) {
    u32 t = threadIdx.x;
    for (u32 d = 1; d < n; d *= 2) {
        bool is_there = t >= d && t < n;
        u64 sum = is_there ? tally.sums[t - d] : 0;
        u32 count = is_there ? tally.counts[t - d] : 0;
        __syncthreads();
        tally.sums[t] += sum;
        tally.counts[t] += count;
        __syncthreads();
    }
}

// Sorts the tokens in the `size` places from `from` on, if there is room for them, and tallies them. Returns how many there
// are, or more than there is room for.
static __device__ u32 sort(const Row& row, Shared& s, u64 from, u64 size) {
    u32 t = threadIdx.x;
    __syncthreads();
    if (t == 0) s.taken = 0;
    s.places[t] = ~0ull;
    __syncthreads();
    volatile u32* taken = &s.taken;
    auto take = [&](float value, u32 id) {
        u64 place = place_of(row, value, id);
        if (place - from >= size || !is_kept(row, value)) return;
        u32 at = atomicAdd(&s.taken, 1u);
        if (at < ROOM) s.places[at] = place;
    };
    each_token(row, s, lowest(row, from, size), take, [&] { return *taken > ROOM; });
    __syncthreads();
    u32 n = s.taken;
    if (n > ROOM) return n;
    u32 m = 1;
    while (m < n) m *= 2;
    for (u32 run = 2; run <= m; run *= 2) {
        for (u32 apart = run / 2; apart > 0; apart /= 2) {
            u32 other = t ^ apart;
            if (t < m && other > t) {
                u64 a = s.places[t], b = s.places[other];
                if ((a > b) == ((t & run) == 0)) s.places[t] = b, s.places[other] = a;
            }
            __syncthreads();
        }
    }
    s.tally.sums[t] = t < n ? weight_of(row, value_of(row.top + (u32)(s.places[t] >> 32))) : 0;
    s.tally.counts[t] = t < n;
    __syncthreads();
    add_up(s.tally, m);
    return n;
}

// Tallies the tokens of bins, each of 2^shift places, from `from` on.
static __device__ void fill_bins(const Row& row, const Shared& s, u64 from, u32 shift, Tally& tally) {
    tally.sums[threadIdx.x] = 0;
    tally.counts[threadIdx.x] = 0;
    __syncthreads();
    auto take = [&](float value, u32 id) {
        u64 bin = (place_of(row, value, id) - from) >> shift, weight = weight_of(row, value);
        if (bin >= BINS || (double)weight < row.least_weight) return;
        // Two halves, and what the lower carries over: memory that a block shares has no fast addition of 64 bits.
        u32* halves = (u32*)&tally.sums[bin];
        u32 before = atomicAdd(halves, (u32)weight);
        u32 upper = (u32)(weight >> 32) + (before + (u32)weight < before);
        if (upper) atomicAdd(halves + 1, upper);
        atomicAdd(&tally.counts[bin], 1u);
    };
    each_token(row, s, lowest(row, from, (u64)BINS << shift), take, [] { return false; });
    __syncthreads();
    add_up(tally, BINS);
}

// ---- Places.

// What is to be reached; at least one token.
struct Goal {
    u32 count;
    double weight;
    u64 sum;
};

static __device__ __forceinline__ bool is_reached(const Goal& goal, u32 count, u64 sum) {
    return count >= goal.count && (double)sum >= goal.weight && sum >= goal.sum;
}

// The first of a tally at which a goal is reached, with what was before it; BINS if it is at none.
static __device__ u32 first_reached(Shared& s, const Tally& tally, const Goal& goal, u32 count, u64 sum) {
    u32 t = threadIdx.x;
    __syncthreads();
    if (t == 0) s.found = BINS;
    __syncthreads();
    if (is_reached(goal, count + tally.counts[t], sum + tally.sums[t]) &&
        (t == 0 || !is_reached(goal, count + tally.counts[t - 1], sum + tally.sums[t - 1])))
        s.found = t;
    __syncthreads();
    return s.found;
}

// A place, and the sum of weights up to and with it.
struct Found {
    u64 place, sum;
};

// The first place at which a goal is reached. `sorted`: all tokens are, else `first` tallies bins of 2^shift places. The
// goal is one that is reached somewhere; else the place is that of no token.
static __device__ Found find(const Row& row, Shared& s, bool sorted, u32 shift, const Goal& goal) {
    u64 from = 0, sum = 0;
    u32 count = 0;
    const Tally* tally = &s.first;
    while (!sorted) {
        u32 bin = first_reached(s, *tally, goal, count, sum);
        if (bin == BINS) return {~0ull, 0};
        u32 own = tally->counts[bin];
        if (bin > 0) {
            own -= tally->counts[bin - 1];
            count += tally->counts[bin - 1], sum += tally->sums[bin - 1];
        }
        from += (u64)bin << shift;
        __syncthreads();
        if (own <= ROOM) {
            sort(row, s, from, 1ull << shift);
            break;
        }
        // At a shift of 0 a bin is one place, which has one token.
        shift = shift > BIN_BITS ? shift - BIN_BITS : 0;
        fill_bins(row, s, from, shift, s.tally);
        tally = &s.tally;
    }
    u32 at = first_reached(s, s.tally, goal, count, sum);
    if (at == BINS) return {~0ull, 0};
    return {s.places[at], sum + s.tally.sums[at]};
}

// ---- Random numbers.

static __device__ __forceinline__ u64 high_product(u64 a, u64 b) {
    u64 a0 = (u32)a, a1 = a >> 32, b0 = (u32)b, b1 = b >> 32;
    u64 middle = a1 * b0 + (a0 * b0 >> 32);
    return a1 * b1 + (middle >> 32) + ((a0 * b1 + (u32)middle) >> 32);
}

// Philox 4x32-10: 64 random bits of a seed, a choice and a position.
static __device__ __forceinline__ u64 draw(const Sampler& sampler) {
    u32 c[4] = {sampler.position[0], sampler.position[1], sampler.choice, 0};
    u32 k[2] = {sampler.seed[0], sampler.seed[1]};
#pragma unroll
    for (u32 round = 0; round < 10; round++) {
        u64 p0 = 0xD2511F53ull * c[0], p1 = 0xCD9E8D57ull * c[2];
        u32 c0 = (u32)(p1 >> 32) ^ c[1] ^ k[0], c2 = (u32)(p0 >> 32) ^ c[3] ^ k[1];
        c[0] = c0, c[1] = (u32)p1, c[2] = c2, c[3] = (u32)p0;
        k[0] += 0x9E3779B9u, k[1] += 0xBB67AE85u;
    }
    return (u64)c[1] << 32 | c[0];
}

// ---- A row.

// The likeliest token.
static __device__ float likeliest(const Row& row, Shared& s) {
    u32 t = threadIdx.x;
    bool has = t < row.spans && descending(s.peaks[t]) == row.top;
    u32 id = smallest_of_block(s, has ? t : ~0u) * SPAN + t;
    has = false;
    if (id < row.cols) {
        u32 i = first_change(s, row.changes, id);
        bool is_changed = i < row.changes && s.changed[i] == id;
        has = descending(is_changed ? s.changed_to[i] : row.logits[id]) == row.top;
    }
    return (float)smallest_of_block(s, has ? id : ~0u);
}

// A token by temperature, min-p, top-k, top-p, draw.
static __device__ float drawn(Row& row, Shared& s, const Sampler& sampler) {
    u32 t = threadIdx.x;
    float min_p = from_bits(sampler.min_p), top_p = from_bits(sampler.top_p), bound = -32.0f;
    if (min_p > 0.0f) {
        float least = contract_ln(min_p);
        bound = sub(least < bound ? bound : least, 0.01f);
    }
    // A little too low, and weights decide: below -32 they are 0.
    row.low = add(row.largest, mul(bound, row.temperature));
    row.least_weight = (double)min_p * (double)ONE;
    if (sampler.top_k > 0 && sampler.top_k <= row.spans) {
        // As many tokens as spans reach the peak of that rank.
        u32 own = t < row.spans ? descending(s.peaks[t]) : 0, larger = 0;
        for (u32 i = 0; t < row.spans && i < row.spans; i++) {
            u32 other = descending(s.peaks[i]);
            larger += other < own || (other == own && i < t);
        }
        if (t < row.spans && larger == sampler.top_k - 1) s.found = own;
        __syncthreads();
        float peak = value_of(s.found);
        if (peak > row.low) row.low = peak;
    }
    u32 count = sort(row, s, 0, ~0ull), shift = 0;
    bool sorted = count <= ROOM;
    u64 total = s.tally.sums[0];
    if (sorted) {
        u32 last = 1;
        while (last < count) last *= 2;
        total = s.tally.sums[last - 1];
    } else {
        u64 end = (u64)(descending(row.low) - row.top) << 32 | 0xFFFFFFFFu;
        while (end >> shift >= BINS) shift++;
        fill_bins(row, s, 0, shift, s.first);
        count = s.first.counts[BINS - 1], total = s.first.sums[BINS - 1];
    }
    if (sampler.top_k > 0 && sampler.top_k < count) total = find(row, s, sorted, shift, {sampler.top_k, 0.0, 0}).sum;
    if (top_p < 1.0f) total = find(row, s, sorted, shift, {1, (double)top_p * (double)total, 0}).sum;
    u64 point = high_product(draw(sampler), total);
    Found found = find(row, s, sorted, shift, {1, 0.0, point + 1});
    return found.place == ~0ull ? NOT_A_NUMBER : (float)(u32)found.place;
}

static __device__ float choose(Row& row, Shared& s, const Step* step, const Sampler& sampler, const float* peaks) {
    u32 t = threadIdx.x;
    if (t < row.spans) s.peaks[t] = peaks[t];
    // NaN before all numbers.
    u32 own = t >= row.spans ? ~0u : is_nan(s.peaks[t]) ? 0 : descending(s.peaks[t]);
    row.top = smallest_of_block(s, own);
    if (row.top == 0) return HAS_NAN;
    if (row.changes > 0) {
        if (t < row.changes) {
            Change change = ((const Change*)step_words(step, sampler.changes))[t];
            float x = add(row.logits[change.token], from_bits(change.bias));
            float penalty = from_bits(sampler.repetition_penalty);
            if (change.seen) x = x > 0.0f ? quotient(x, penalty) : mul(x, penalty);
            if (change.count > 0) {
                x = sub(x, mul((float)change.count, from_bits(sampler.frequency_penalty)));
                x = sub(x, from_bits(sampler.presence_penalty));
            }
            s.changed[t] = change.token;
            s.changed_to[t] = x;
        }
        __syncthreads();
        change_peaks(row, s);
        __syncthreads();
        row.top = smallest_of_block(s, t < row.spans ? descending(s.peaks[t]) : ~0u);
    }
    row.largest = value_of(row.top);
    if (row.largest == negated(INFINITE)) return NOTHING;
    return row.temperature == 0.0f ? likeliest(row, s) : drawn(row, s, sampler);
}

// logits [R, cols], peaks [R, ceil(cols / SPAN)] -> y [R, 1]: each row's token, as a number.
extern "C" __global__ void __launch_bounds__(THREADS) sample_rows(const Step* step, u32 cols, const float* logits,
                                                                  const float* peaks, float* y) {
    __shared__ Shared s;
    after_inputs();
    u32 at = blockIdx.x;
    if (at >= step->wanted) return;
    Sampler sampler = ((const Sampler*)step_words(step, step->samplers))[at];
    float chosen = UNASKED;
    if (sampler.asked) {
        Row row = {};
        row.logits = logits + (u64)at * cols;
        row.cols = cols;
        row.spans = (cols + SPAN - 1) / SPAN;
        row.changes = sampler.change_count < CHANGES ? sampler.change_count : CHANGES;
        row.temperature = from_bits(sampler.temperature);
        chosen = choose(row, s, step, sampler, peaks + (u64)at * row.spans);
    }
    if (threadIdx.x == 0) y[at] = chosen;
}
