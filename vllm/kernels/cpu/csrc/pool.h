// SPDX-License-Identifier: Apache-2.0
// The process's one set of threads for the kernels, made for cores that others use too.
//
// A job is work that its threads take in pieces. The caller works as well, and a worker takes part only if it comes
// while there is work left: one that is put off its core before it comes holds nobody up, one that is put off later
// holds up its piece only. Who waits looks for a short while and then sleeps: a thread that keeps looking uses up its
// share of a crowded core, and a caller that sleeps leaves its core to the worker that it waits for.
#pragma once

// Runs work(arg) on the calling thread and on up to `threads` - 1 others, at most once on each; returns when all that
// began have ended. Called while another thread's job runs, it runs on the caller alone.
void run_on_threads(int threads, void (*work)(void*), void* arg);
