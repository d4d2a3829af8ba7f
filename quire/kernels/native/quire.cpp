// The library's entry points: quire_run executes a program, a list of ops with their arguments.
//
//     program = { int64 op, int64 bytes of arguments, arguments } ...
//
// An eager call is a program of one op; a tape is a long one. Arguments are 8-byte fields in the
// order of the structs; the Python side packs them in the same order (see library.py).
#include <sys/mman.h>

#include <cstdlib>

#include "attention.h"
#include "codes_experts.h"
#include "int8_linear.h"
#include "patches.h"
#include "recurrent.h"
#include "router.h"

namespace {

template <class Args>
struct Entry {
  static Plan plan_of(const void* args, int threads) { return plan(*(const Args*)args, threads); }
  static void run_on(const void* args, const Team& team) { run(*(const Args*)args, team); }
};

struct Op {
  Plan (*plan)(const void*, int);
  void (*run)(const void*, const Team&);
  long bytes;
};

#define OP(Args) {Entry<Args>::plan_of, Entry<Args>::run_on, (long)sizeof(Args)}
const Op OPS[] = {
    OP(LinearArgs), OP(PackArgs), OP(EmbeddingArgs), OP(NormArgs),
    OP(RopeArgs),   OP(MapArgs),  OP(WriteArgs),     OP(AttentionArgs),
    OP(MaskArgs),   OP(CodesLinearArgs), OP(CodesEmbeddingArgs), OP(LoraArgs),
    OP(Int8LinearArgs), OP(CodesExpertsArgs), OP(LoraRowsArgs), OP(RouterArgs),
    OP(LocalExpertsArgs), OP(CopyArgs), OP(ConvArgs), OP(SsdArgs),
    OP(SelectiveArgs), OP(DeltaArgs), OP(GatedNormArgs), OP(GateArgs),
    OP(PatchesArgs),
};
constexpr long OP_COUNT = sizeof OPS / sizeof *OPS;

struct Program {
  const char* at;
  long bytes;
};

struct Step {  // one entry of a program
  long op, bytes;
  const void* args() const { return this + 1; }
  const Step* next() const { return (const Step*)((const char*)(this + 1) + bytes); }
};

// Every rank walks the program. Ops too small to share run on rank 0; a barrier is between two
// ops unless both are of that kind.
void walk(const void* given, const Team& team) {
  const Program& program = *(const Program*)given;
  const Step* end = (const Step*)(program.at + program.bytes);
  bool first = true, shared = false;
  int turn = 0;
  for (const Step* step = (const Step*)program.at; step < end; step = step->next()) {
    const Op& op = OPS[step->op];
    const bool now = team.size > 1 && op.plan(step->args(), team.size).parallel;
    if ((now || shared) && !first) team.barrier();
    first = false;
    shared = now;
    if (now) {
      Team mine = team;
      mine.next = team.next + (turn & 1);
      op.run(step->args(), mine);
      turn++;
      // The other counter: it is not used between the barriers around this op.
      if (team.rank == 0) team.next[turn & 1].store(0, std::memory_order_relaxed);
    } else if (team.rank == 0) {
      std::atomic<long> next{0};
      op.run(step->args(), Team{0, 1, team.scratch, &next, nullptr, nullptr});
    }
  }
}

struct Scratch {  // of the calling thread; only grows
  char* data = nullptr;
  long bytes = 0;
  ~Scratch() { free(data); }
  char* need(long n) {
    if (n > bytes) {
      free(data);
      bytes = (n + (1 << 21)) / 4096 * 4096;
      data = (char*)aligned_alloc(4096, bytes);
    }
    return data;
  }
};

int threads = 1;
std::atomic<Pool*> pool{nullptr};

Pool* get_pool() {
  static std::mutex starting;
  std::lock_guard<std::mutex> hold(starting);
  if (!pool.load()) pool.store(new Pool(threads));
  return pool.load();
}

}  // namespace

extern "C" {

// Set the number of threads. Call once, before the first run.
void quire_threads(long n) {
  threads = (int)(n < 1 ? 1 : n);
  pthread_atfork(nullptr, nullptr, [] { pool.store(nullptr); });  // its threads are not here
}

// 0, or 1 + the index of a malformed entry. Check a program once, before its first run.
long quire_check(const void* program, long bytes) {
  const Step* end = (const Step*)((const char*)program + bytes);
  long index = 0;
  for (const Step* s = (const Step*)program; s < end; s = s->next(), index++)
    if (s->op < 0 || s->op >= OP_COUNT || s->bytes != OPS[s->op].bytes) return 1 + index;
  return 0;
}

void quire_run(const void* at, long bytes) {
  static thread_local Scratch scratch;
  const Program program{(const char*)at, bytes};
  const Step* end = (const Step*)(program.at + bytes);
  bool parallel = false;
  long need = 0;
  for (const Step* s = (const Step*)at; s < end; s = s->next()) {
    const Plan p = OPS[s->op].plan(s->args(), threads);
    parallel |= p.parallel;
    if (p.scratch > need) need = p.scratch;
  }
  char* memory = scratch.need(need);
  if (parallel && threads > 1) {
    Pool* shared = get_pool();
    std::unique_lock<std::mutex> hold(shared->busy, std::try_to_lock);
    if (hold.owns_lock()) return shared->run(walk, &program, memory);
  }
  walk(&program, Team{0, 1, memory, nullptr, nullptr, nullptr});
}

// Ask for large pages under fresh memory: streaming a weight then misses the TLB 512 times less.
void quire_large_pages(void* at, long bytes) {
#if defined(MADV_HUGEPAGE)
  const uintptr_t page = 4096, from = ((uintptr_t)at + page - 1) / page * page;
  const uintptr_t to = ((uintptr_t)at + bytes) / page * page;
  if (to > from) madvise((void*)from, to - from, MADV_HUGEPAGE);
#endif
}

const char* quire_features() {
  if (has_tiles()) return "avx512-bf16 and amx";
#if defined(__AVX512BF16__)
  return "avx512-bf16";
#elif defined(__AVX512F__)
  return "avx512";
#elif defined(__AVX2__)
  return "avx2";
#else
  return "generic";
#endif
}
}
