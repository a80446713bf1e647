// SPDX-License-Identifier: Apache-2.0
#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace {

// How long to look before sleeping. A worker bridges the gap between the kernels of a step; the caller waits for pieces
// that are nearly done, or for a worker that is off its core.
constexpr int64_t WORKER_NS = 150'000, CALLER_NS = 50'000;

constexpr uint32_t OPEN = 1u << 31, AWAITED = 1u << 30, LIMIT = 1u << 12, INSIDE = LIMIT - 1;

struct Pool {
  alignas(64) std::atomic<uint32_t> bell{0};  // rises with every job
  std::atomic<int> sleepers{0};               // workers asleep on it
  alignas(64) std::atomic<uint32_t> gate{0};  // OPEN while the job takes workers, their limit, those inside
  std::atomic<bool> taken{false};
  void (*work)(void*) = nullptr;
  void* arg = nullptr;
  int workers = 0;
};
Pool pool;  // never destroyed: workers look at it until the process ends

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
  syscall(SYS_futex, (uint32_t*)&word, operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

// Whether ready() came true within the time.
template <class Ready> bool spin(int64_t ns, Ready&& ready) {
  if (ready()) return true;
  for (int64_t end = now_ns() + ns; now_ns() < end;)
    for (int i = 0; i < 32; i++) {
      pause();
      if (ready()) return true;
    }
  return false;
}

void* worker(void* seen_at_start) {
  uint32_t seen = (uint32_t)(uintptr_t)seen_at_start;
  for (;;) {
    auto rung = [&] { return pool.bell.load(std::memory_order_acquire) != seen; };
    while (!spin(WORKER_NS, rung)) {
      pool.sleepers.fetch_add(1);
      futex(pool.bell, FUTEX_WAIT, seen);
      pool.sleepers.fetch_sub(1);
    }
    seen = pool.bell.load(std::memory_order_acquire);
    uint32_t gate = pool.gate.load(std::memory_order_acquire);
    while (gate & OPEN && (gate & INSIDE) < gate / LIMIT % LIMIT)
      if (pool.gate.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
        pool.work(pool.arg);
        gate = pool.gate.fetch_sub(1, std::memory_order_acq_rel) - 1;
        if (gate & AWAITED && !(gate & INSIDE)) futex(pool.gate, FUTEX_WAKE, 1);
        break;
      }
  }
}

void after_fork() {  // the child has no workers
  pool.bell = 0;
  pool.sleepers = 0;
  pool.gate = 0;
  pool.taken = false;
  pool.workers = 0;
}

void start_worker() {
  static const int registered = pthread_atfork(nullptr, nullptr, after_fork);
  (void)registered;
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are the program's own threads' affair
  pthread_t thread;
  if (pthread_create(&thread, nullptr, worker, (void*)(uintptr_t)pool.bell.load()) == 0) {
    pthread_setname_np(thread, "vllm-kernels");
    pthread_detach(thread);
    pool.workers++;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace

void run_on_threads(int threads, void (*work)(void*), void* arg) {
  if (threads <= 1 || pool.taken.exchange(true, std::memory_order_acquire)) return work(arg);
  int limit = threads - 1 < (int)INSIDE ? threads - 1 : (int)INSIDE;
  for (int missing = limit - pool.workers; missing > 0; missing--) start_worker();
  pool.work = work;
  pool.arg = arg;
  pool.gate.store(OPEN | (uint32_t)limit * LIMIT, std::memory_order_release);
  pool.bell.fetch_add(1);
  if (pool.sleepers.load() > 0) futex(pool.bell, FUTEX_WAKE, (uint32_t)limit);
  work(arg);
  pool.gate.fetch_and(~OPEN, std::memory_order_acq_rel);
  auto empty = [] { return !(pool.gate.load(std::memory_order_acquire) & INSIDE); };
  if (!spin(CALLER_NS, empty)) {
    uint32_t gate = pool.gate.fetch_or(AWAITED, std::memory_order_acq_rel) | AWAITED;
    for (; gate & INSIDE; gate = pool.gate.load(std::memory_order_acquire)) futex(pool.gate, FUTEX_WAIT, gate);
  }
  pool.taken.store(false, std::memory_order_release);
}
