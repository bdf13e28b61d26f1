// Collectives of processes on one host through memory that all of them have mapped.
//
// Plain functions for ctypes, for Linux, without torch: what is compiled hangs on no version of it.
//
// The memory is, in units of LINE: a word that says that somebody has given up; a line for each
// rank; then from PAGE on for each of two turns a buffer for each rank. A message goes in pieces
// that fit a buffer. For each piece a rank writes its buffer, publishes that by counting its own
// `step` up (release), waits until all others have (acquire), and reads theirs. Pieces take turns:
// who is at piece n + 2 and writes over what was written for n has seen all ranks publish n + 1,
// which they do when they have read n. That is all the order that is needed, on any machine that
// has std::atomic.
//
// Sums are taken in the order of the ranks, by each rank or by one for all: the same bits on all of
// them. Terms of 16 bits are summed in float, and rounded once.

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstring>
#include <new>
#include <numeric>

namespace {

constexpr size_t LINE = 128, PAGE = 4096;
constexpr double YIELDING = 500e-6, CROWDED = 50e-6;  // seconds
constexpr long CHECKS = 20'000'000;                   // nanoseconds
constexpr uint64_t SHY = 64;                          // times
constexpr size_t TWO_SHOTS = 32 << 10;  // bytes from which three ranks and more share the sums

static_assert(std::atomic<uint32_t>::is_always_lock_free, "a lock would be in this process only");

constexpr size_t MOST_RANKS = 1024;

enum Outcome { DONE, LEFT, STOPPED, DIFFERS };
enum Kind { REDUCE, GATHER, SCATTER, EXCHANGE };
enum Reduction { SUM, MAX, MIN };
enum Dtype { FLOAT32, FLOAT64, BFLOAT16, FLOAT16, INT32, INT64 };

struct Rank {
  std::atomic<uint32_t> step, sleepers;
  uint64_t call[2];  // what it does, by turn: ranks that do different things must not mix them up
};

struct Channel {
  char* memory;
  size_t rank, ranks, room;
  int (*check)();  // called from time to time while waiting; whether to stop
  uint64_t spins, turn = 0, call = 0, shy = 0;
  uint32_t step = 0;

  std::atomic<uint32_t>& left() { return *reinterpret_cast<std::atomic<uint32_t>*>(memory); }
  Rank& line(size_t k) { return *reinterpret_cast<Rank*>(memory + (k + 1) * LINE); }
  char* buffer(size_t k) {
    size_t before = (ranks + 1) * LINE;
    before = (before + PAGE - 1) / PAGE * PAGE;
    return memory + before + (turn * ranks + k) * room;
  }
};

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

void breathe() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int futex(std::atomic<uint32_t>& word, int op, uint32_t value, const timespec* limit) {
  return static_cast<int>(syscall(SYS_futex, &word, op, value, limit, nullptr, 0));
}

// Wait until rank k has published `step`: at first on the processor, then yielding it, then asleep.
// Where others want the processor, to yield is to give it away for long, while who sleeps is woken:
// then this rank is shy to yield for some time.
Outcome await_rank(Channel& c, size_t k) {
  Rank& other = c.line(k);
  auto there = [&] {
    return static_cast<int32_t>(other.step.load(std::memory_order_seq_cst) - c.step) >= 0;
  };
  for (uint64_t i = 0; i < c.spins; i++) {
    if (there()) return DONE;
    breathe();
  }
  if (c.shy) {
    c.shy--;
  } else {
    for (double begun = now(), time = begun; time - begun < YIELDING;) {
      if (there()) return DONE;
      double before = time;
      sched_yield();
      time = now();
      if (time - before > CROWDED) {
        c.shy = SHY;
        break;
      }
    }
  }
  other.sleepers.fetch_add(1, std::memory_order_seq_cst);
  Outcome out = DONE;
  while (!there()) {
    uint32_t seen = other.step.load(std::memory_order_seq_cst);
    timespec limit = {0, CHECKS};
    if (there()) break;
    if (futex(other.step, FUTEX_WAIT, seen, &limit) == 0 || errno == EAGAIN) continue;
    if (c.left().load(std::memory_order_acquire)) {
      out = there() ? DONE : LEFT;
      break;
    }
    if (c.check()) {
      out = there() ? DONE : STOPPED;
      break;
    }
  }
  other.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return out;
}

// Publish what this rank wrote, and wait until all have; the first of a piece compares what it is.
Outcome meet(Channel& c, bool first) {
  Rank& mine = c.line(c.rank);
  if (first) mine.call[c.turn] = c.call;
  mine.step.store(++c.step, std::memory_order_seq_cst);
  if (mine.sleepers.load(std::memory_order_seq_cst)) futex(mine.step, FUTEX_WAKE, INT_MAX, nullptr);
  for (size_t k = 0; k < c.ranks; k++) {
    if (k == c.rank) continue;
    Outcome out = await_rank(c, k);
    if (out) return out;
    if (first && c.line(k).call[c.turn] != c.call) return DIFFERS;
  }
  return DONE;
}

// What is added up of each dtype: its value in a wider one, and back.

template <typename T>
struct Same {
  using Stored = T;
  using Wide = T;
  static T widen(T x) { return x; }
  static T narrow(T x) { return x; }
};

template <typename To, typename From>
To bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "");
  To out;
  std::memcpy(&out, &x, sizeof out);
  return out;
}

struct BFloat16 {
  using Stored = uint16_t;
  using Wide = float;
  static float widen(uint16_t x) { return bits<float>(static_cast<uint32_t>(x) << 16); }
  static uint16_t narrow(float x) {
    uint32_t b = bits<uint32_t>(x);
    uint16_t even = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
    return x == x ? even : 0x7fc0;
  }
};

struct Float16 {
  using Stored = uint16_t;
  using Wide = float;
  static float widen(uint16_t x) {
    uint32_t size = static_cast<uint32_t>(x & 0x7fff) << 13, sign = (x & 0x8000u) << 16;
    uint32_t b = bits<uint32_t>(bits<float>(size) * 0x1p112f);
    if (size >= 0x0f800000) b |= 0x7f800000;  // infinity, or none
    return bits<float>(b | sign);
  }
  static uint16_t narrow(float x) {
    uint32_t b = bits<uint32_t>(x), size = b & 0x7fffffff, out;
    if (size > 0x7f800000) {
      out = 0x7e00;
    } else if (size >= 0x477ff000) {
      out = 0x7c00;
    } else if (size < 0x38800000) {  // adding 0.5 rounds to what a subnormal has
      out = bits<uint32_t>(bits<float>(size) + 0.5f) - 0x3f000000;
    } else {
      out = (size - 0x38000000 + 0xfff + ((size >> 13) & 1)) >> 13;
    }
    return static_cast<uint16_t>(out | (b >> 16 & 0x8000));
  }
};

template <typename W, Reduction R>
W reduced(W a, W b) {
  if (R == SUM) return a + b;
  if (a != a) return a;  // one that is no number shows, whichever rank has it
  if (b != b) return b;
  return (R == MAX) == (a < b) ? b : a;
}

// out[i] = the sum (or so) over k of terms[k][i], in the order of k.
template <typename D, Reduction R>
void combine(const char* const* terms, size_t ranks, char* out, size_t count) {
  using S = typename D::Stored;
  using W = typename D::Wide;
  constexpr size_t BLOCK = 512;
  W sums[BLOCK];
  for (size_t at = 0; at < count; at += BLOCK) {
    size_t n = std::min(BLOCK, count - at);
    auto from = [&](size_t k) { return reinterpret_cast<const S*>(terms[k]) + at; };
    const S* x = from(0);
    for (size_t i = 0; i < n; i++) sums[i] = D::widen(x[i]);
    for (size_t k = 1; k < ranks; k++) {
      x = from(k);
      for (size_t i = 0; i < n; i++) sums[i] = reduced<W, R>(sums[i], D::widen(x[i]));
    }
    S* to = reinterpret_cast<S*>(out) + at;
    for (size_t i = 0; i < n; i++) to[i] = D::narrow(sums[i]);
  }
}

using Combine = void (*)(const char* const*, size_t, char*, size_t);

template <typename D>
Combine by_reduction(int reduction) {
  if (reduction == SUM) return combine<D, SUM>;
  return reduction == MAX ? combine<D, MAX> : combine<D, MIN>;
}

Combine combining(int dtype, int reduction) {
  switch (dtype) {
    case FLOAT32: return by_reduction<Same<float>>(reduction);
    case FLOAT64: return by_reduction<Same<double>>(reduction);
    case BFLOAT16: return by_reduction<BFloat16>(reduction);
    case FLOAT16: return by_reduction<Float16>(reduction);
    case INT32: return by_reduction<Same<int32_t>>(reduction);
    default: return by_reduction<Same<int64_t>>(reduction);
  }
}

size_t size_of(int dtype) {
  if (dtype == BFLOAT16 || dtype == FLOAT16) return 2;
  return dtype == FLOAT32 || dtype == INT32 ? 4 : 8;
}

// One piece of an all-reduce, by each rank for itself.
Outcome reduce_alone(Channel& c, Combine sum, const char* in, char* out, size_t n, size_t size) {
  std::memcpy(c.buffer(c.rank), in, n * size);
  Outcome met = meet(c, true);
  if (met) return met;
  const char* terms[MOST_RANKS];
  for (size_t k = 0; k < c.ranks; k++) terms[k] = k == c.rank ? in : c.buffer(k);
  sum(terms, c.ranks, out, n);
  return DONE;
}

// The same where each rank sums a part for all; its buffer takes that, where nobody else reads.
Outcome reduce_together(Channel& c, Combine sum, const char* in, char* out, size_t n, size_t size) {
  auto begin = [&](size_t k) { return k * n / c.ranks * size; };
  std::memcpy(c.buffer(c.rank), in, n * size);
  Outcome met = meet(c, true);
  if (met) return met;
  const char* terms[MOST_RANKS];
  size_t a = begin(c.rank), length = begin(c.rank + 1) - a;
  for (size_t k = 0; k < c.ranks; k++) terms[k] = (k == c.rank ? in : c.buffer(k)) + a;
  sum(terms, c.ranks, out + a, length / size);
  std::memcpy(c.buffer(c.rank) + a, out + a, length);
  met = meet(c, false);
  if (met) return met;
  for (size_t k = 0; k < c.ranks; k++) {
    if (k != c.rank) std::memcpy(out + begin(k), c.buffer(k) + begin(k), begin(k + 1) - begin(k));
  }
  return DONE;
}

// Whether a call can begin: none does after one has failed, on this rank or another.
Outcome begin(Channel& c, Kind kind, int dtype, int reduction, size_t bytes) {
  c.call = bytes << 8 | static_cast<uint64_t>(dtype) << 4 | reduction << 2 | kind;
  return c.left().load(std::memory_order_acquire) ? LEFT : DONE;
}

}  // namespace

extern "C" {

size_t shardwright_bytes(size_t ranks, size_t room) {
  return ((ranks + 1) * LINE + PAGE - 1) / PAGE * PAGE + 2 * ranks * room;
}

size_t shardwright_state() { return sizeof(Channel); }

// Make the channel of one rank in `state`, which has room for it; `memory` is zeros at first.
void shardwright_open(void* state, void* memory, size_t rank, size_t ranks, size_t room,
                      uint64_t spins, int (*check)()) {
  new (state) Channel{static_cast<char*>(memory), rank, ranks, room, check, spins};
}

// No call succeeds any more, on no rank.
void shardwright_leave(void* channel) {
  static_cast<Channel*>(channel)->left().store(1, std::memory_order_release);
}

int shardwright_all_reduce(
    void* channel, const char* in, char* out, size_t count, int dtype, int reduction) {
  Channel& c = *static_cast<Channel*>(channel);
  Combine sum = combining(dtype, reduction);
  size_t size = size_of(dtype), most = c.room / size;
  Outcome begun = begin(c, REDUCE, dtype, reduction, count * size);
  if (begun) return begun;
  auto reduce = c.ranks > 2 && count * size >= TWO_SHOTS ? reduce_together : reduce_alone;
  for (size_t at = 0; at < count; at += most) {
    size_t n = std::min(most, count - at);
    c.turn ^= 1;
    Outcome met = reduce(c, sum, in + at * size, out + at * size, n, size);
    if (met) return met;
  }
  return DONE;
}

// in: [rows, bytes / rows]; out: [rows, ranks, bytes / rows].
int shardwright_all_gather(void* channel, const char* in, char* out, size_t bytes, size_t rows) {
  Channel& c = *static_cast<Channel*>(channel);
  Outcome begun = begin(c, GATHER, 0, 0, bytes ^ rows << 32);
  if (begun) return begun;
  size_t row = bytes / rows;
  for (size_t at = 0; at < bytes; at += c.room) {
    size_t end = std::min(at + c.room, bytes);
    c.turn ^= 1;
    std::memcpy(c.buffer(c.rank), in + at, end - at);
    Outcome met = meet(c, true);
    if (met) return met;
    for (size_t k = 0; k < c.ranks; k++) {
      const char* part = k == c.rank ? in + at : c.buffer(k);
      for (size_t i = at, n; i < end; i += n) {
        n = std::min(row - i % row, end - i);
        std::memcpy(out + (i / row * c.ranks + k) * row + i % row, part + (i - at), n);
      }
    }
  }
  return DONE;
}

// in: [ranks, count]; out: [count], the sum of what all have in this rank's row.
int shardwright_reduce_scatter(
    void* channel, const char* in, char* out, size_t count, int dtype) {
  Channel& c = *static_cast<Channel*>(channel);
  Combine sum = combining(dtype, SUM);
  size_t size = size_of(dtype), most = c.room / size / c.ranks;
  Outcome begun = begin(c, SCATTER, dtype, SUM, count * size);
  if (begun) return begun;
  for (size_t at = 0; at < count; at += most) {
    size_t n = std::min(most, count - at) * size;
    c.turn ^= 1;
    for (size_t k = 0; k < c.ranks; k++) {
      if (k == c.rank) continue;
      std::memcpy(c.buffer(c.rank) + k * n, in + (k * count + at) * size, n);
    }
    Outcome met = meet(c, true);
    if (met) return met;
    const char* terms[MOST_RANKS];
    for (size_t k = 0; k < c.ranks; k++) {
      terms[k] = k == c.rank ? in + (k * count + at) * size : c.buffer(k) + c.rank * n;
    }
    sum(terms, c.ranks, out + at * size, n / size);
  }
  return DONE;
}

// in: what each rank gets from this one, of `send` bytes; out: what comes from each, of `receive`.
// A buffer begins with `send`, by which all ranks know how many pieces there are.
int shardwright_all_to_all(
    void* channel, const char* in, char* out, const uint64_t* send, const uint64_t* receive) {
  Channel& c = *static_cast<Channel*>(channel);
  Outcome begun = begin(c, EXCHANGE, 0, 0, 0);
  if (begun) return begun;
  if (send[c.rank] != receive[c.rank]) return DIFFERS;
  const uint64_t most = c.room / c.ranks - sizeof *send;
  auto sizes = [&](size_t k) { return reinterpret_cast<uint64_t*>(c.buffer(k)); };
  auto piece = [&](size_t k, size_t to) {
    return c.buffer(k) + c.ranks * sizeof *send + to * most;
  };
  uint64_t at = 0, longest = 0;
  do {
    c.turn ^= 1;
    for (size_t k = 0, start = 0; k < c.ranks; start += send[k++]) {
      sizes(c.rank)[k] = k == c.rank ? 0 : send[k];
      if (k == c.rank || at >= send[k]) continue;
      std::memcpy(piece(c.rank, k), in + start + at, std::min(most, send[k] - at));
    }
    Outcome met = meet(c, true);
    if (met) return met;
    for (size_t k = 0, start = 0; k < c.ranks; start += receive[k++]) {
      longest = std::max(longest, *std::max_element(sizes(k), sizes(k) + c.ranks));
      if (k == c.rank) continue;
      if (sizes(k)[c.rank] != receive[k]) return DIFFERS;
      if (at >= receive[k]) continue;
      std::memcpy(out + start + at, piece(k, c.rank), std::min(most, receive[k] - at));
    }
    at += most;
  } while (at < longest);
  const char* own = in + std::accumulate(send, send + c.rank, uint64_t{0});
  std::memcpy(out + std::accumulate(receive, receive + c.rank, uint64_t{0}), own, send[c.rank]);
  return DONE;
}

}  // extern "C"
