// Threads that run one program together: every rank walks the same list of ops.
// The caller is rank 0. Workers spin for a moment after a program, so that the next one finds them
// awake, then sleep: an idle engine uses no CPU. A forked child starts threads of its own.
// A second caller at the same time runs its program alone; results do not depend on the ranks.
#pragma once
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "simd.h"

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

  void barrier() const {
    if (size == 1) return;
    uint32_t now = phase->load(std::memory_order_acquire);
    if (arrived->fetch_add(1, std::memory_order_acq_rel) == size - 1) {
      arrived->store(0, std::memory_order_relaxed);
      phase->store(now + 1, std::memory_order_release);
      return;
    }
    for (long spins = 1; phase->load(std::memory_order_acquire) == now; spins++)
      if (spins < 10000 || spins % 512)
        relax();
      else
        sched_yield();  // a rank lost its core: let it run, should it be waiting for this one
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

  void run(Job job, const void* program, char* scratch) {
    job_ = job;
    cores_[0].store(core(), std::memory_order_relaxed);
    program_ = program;
    scratch_ = scratch;
    next_[0].store(0, std::memory_order_relaxed);
    next_[1].store(0, std::memory_order_relaxed);
    epoch_.fetch_add(1);
    if (asleep_.load() > 0) {
      std::lock_guard<std::mutex> hold(lock_);
      wake_.notify_all();
    }
    job(program, team(0));
    team(0).barrier();  // no thread touches the program after this
  }

  std::mutex busy;

 private:
  Team team(int rank) { return {rank, size_, scratch_, next_, &arrived_, &phase_}; }

  void work(int rank) {
    for (uint32_t seen = 0;;) {
      wait(seen);
      seen++;
      spread(rank);
      job_(program_, team(rank));
      team(rank).barrier();
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

  void wait(uint32_t seen) {
    auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(200);
    do {
      for (int i = 0; i < 100; i++) {
        if (epoch_.load(std::memory_order_acquire) != seen) return;
        relax();
      }
    } while (std::chrono::steady_clock::now() < until);
    std::unique_lock<std::mutex> hold(lock_);
    asleep_.fetch_add(1);
    wake_.wait(hold, [&] { return epoch_.load() != seen; });
    asleep_.fetch_sub(1);
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
  std::mutex lock_;
  std::condition_variable wake_;
};
