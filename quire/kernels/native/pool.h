// Threads that run one program together: every rank walks the same list of ops.
// The caller is rank 0. Workers spin for a moment after a program, so that the next one finds them
// awake, then sleep: an idle engine burns nothing. A forked child starts threads of its own.
// A second caller at the same time runs its program alone; results do not depend on the ranks.
// A rank that loses its core to another process makes all others wait. Where that costs more than
// the rank brings (a server whose clients run on the same cores), the team goes without it for a
// while, and tries again.
#pragma once
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "simd.h"

using Clock = std::chrono::steady_clock;

constexpr int PATIENCE = 2000;  // turns at a barrier, 50 us: ranks that run are apart by less

INLINE void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// What an op sees of the threads that run it.
struct Team {
  int rank, size;
  char* scratch;                // shared by all ranks of the op
  std::atomic<long>* next;      // work counter, 0 when the op starts
  std::atomic<int>* arrived;
  std::atomic<uint32_t>* phase;
  std::atomic<long>* lost;      // ns that ranks waited for one without a core

  void barrier() const {
    if (size == 1) return;
    uint32_t now = phase->load(std::memory_order_acquire);
    if (arrived->fetch_add(1, std::memory_order_acq_rel) == size - 1) {
      arrived->store(0, std::memory_order_relaxed);
      phase->store(now + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; spins < PATIENCE; spins++) {
      if (phase->load(std::memory_order_acquire) != now) return;
      relax();
    }
    const auto since = Clock::now();
    for (long spins = 1; phase->load(std::memory_order_acquire) == now; spins++)
      if (spins < 8000 || spins % 512)
        relax();
      else
        sched_yield();  // a rank lost its core: let it run, should it be waiting for this one
    lost->fetch_add((Clock::now() - since).count(), std::memory_order_relaxed);
  }

  long take(long count) const { return next->fetch_add(count, std::memory_order_relaxed); }

  // This rank's share [from, to) of n things.
  void share(long n, long& from, long& to) const {
    from = n * rank / size;
    to = n * (rank + 1) / size;
  }
};

typedef void (*Job)(const void* program, const Team& team);

class Pool {
 public:
  explicit Pool(int size) : size_(size), cores_(size) {
    for (auto& core : cores_) core.store(-1);
    for (int rank = 1; rank < size; rank++)
      std::thread([this, rank] { work(rank); }).detach();  // they live as long as the process
  }

  // How many ranks the next program has.
  int ranks() const { return Clock::now() < short_until_ ? size_ - 1 : size_; }

  void run(Job job, const void* program, char* scratch, int ranks) {
    const auto began = Clock::now();
    job_ = job;
    cores_[0].store(core(), std::memory_order_relaxed);
    program_ = program;
    scratch_ = scratch;
    next_[0].store(0, std::memory_order_relaxed);
    next_[1].store(0, std::memory_order_relaxed);
    epoch_.store(((epoch_.load() >> RANKS) + 1) << RANKS | (uint32_t)ranks);
    if (asleep_.load() > 0) {
      std::lock_guard<std::mutex> hold(lock_);
      wake_.notify_all();
    }
    const Team mine = team(0, ranks);
    job(program, mine);
    mine.barrier();  // nobody touches the program after this
    if (ranks == size_) judge(began);
  }

  std::mutex busy;

 private:
  static constexpr int RANKS = 10;  // bits of the epoch that hold the number of ranks
  static constexpr auto WINDOW = std::chrono::milliseconds(20);
  static constexpr auto SHORTEST = std::chrono::milliseconds(100);
  static constexpr auto LONGEST = std::chrono::milliseconds(1600);

  Team team(int rank, int ranks) {
    return {rank, ranks, scratch_, next_, &arrived_, &phase_, &lost_};
  }

  // After a program of all ranks: whether the last one is worth waiting for. Seen over a window,
  // since one wait says little; each time that it was not, the pause before the next try doubles.
  void judge(Clock::time_point began) {
    const auto now = Clock::now();
    spent_ += now - began;
    if (spent_ < WINDOW) return;
    const auto lost = std::chrono::nanoseconds(lost_.exchange(0)) / (size_ - 1);
    if (lost * 4 > spent_) {
      short_until_ = now + pause_;
      pause_ = std::min<Clock::duration>(pause_ * 2, LONGEST);
    } else {
      pause_ = SHORTEST;
    }
    spent_ = Clock::duration::zero();
  }

  // A rank that is left out of a program may miss it altogether; one that is not cannot: the
  // others wait for it.
  void work(int rank) {
    for (uint32_t seen = 0;;) {
      seen = wait(seen);
      const int ranks = (int)(seen & ((1u << RANKS) - 1));
      if (rank >= ranks) continue;
      spread(rank);
      const Team mine = team(rank, ranks);
      job_(program_, mine);
      mine.barrier();
    }
  }

  static int core() {
#if defined(__linux__)
    return sched_getcpu();
#else
    return -1;
#endif
  }

  // Two ranks on one core run at half speed until the system notices, and it notices late: it wakes
  // a thread where its waker runs. So a worker that finds itself on the core of a lower rank moves
  // to a free one; then it may be moved again as the system likes.
  void spread(int rank) {
#if defined(__linux__)
    const int here = core();
    cores_[rank].store(here, std::memory_order_relaxed);
    bool alone = true;
    for (int i = 0; i < rank; i++) alone &= cores_[i].load(std::memory_order_relaxed) != here;
    if (alone) return;
    cpu_set_t allowed, target;
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return;
    target = allowed;
    for (int i = 0; i < size_; i++) {
      const int taken = cores_[i].load(std::memory_order_relaxed);
      if (taken >= 0) CPU_CLR(taken, &target);
    }
    if (CPU_COUNT(&target) == 0 || sched_setaffinity(0, sizeof target, &target)) return;
    cores_[rank].store(core(), std::memory_order_relaxed);
    sched_setaffinity(0, sizeof allowed, &allowed);
#else
    (void)rank;
#endif
  }

  // The epoch after the one seen: a program has begun.
  uint32_t wait(uint32_t seen) {
    uint32_t now;
    auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(200);
    do {
      for (int i = 0; i < 100; i++) {
        if ((now = epoch_.load(std::memory_order_acquire)) != seen) return now;
        relax();
      }
    } while (std::chrono::steady_clock::now() < until);
    std::unique_lock<std::mutex> hold(lock_);
    asleep_.fetch_add(1);
    wake_.wait(hold, [&] { return (now = epoch_.load()) != seen; });
    asleep_.fetch_sub(1);
    return now;
  }

  const int size_;
  std::vector<std::atomic<int>> cores_;  // where each rank was last seen
  Job job_ = nullptr;
  const void* program_ = nullptr;
  char* scratch_ = nullptr;
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int> asleep_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  alignas(64) std::atomic<long> next_[2] = {};
  alignas(64) std::atomic<long> lost_{0};
  Clock::duration spent_{0}, pause_{SHORTEST};  // these three: the caller's
  Clock::time_point short_until_{};
  std::mutex lock_;
  std::condition_variable wake_;
};
