// FLINT_CLONES: compile an inner loop for wider vectors too, and let the loader pick.
//
// Clang, older GCCs and libraries without ifunc get the baseline alone. A clone with fused
// multiply-adds has other bits than one without; one machine always has the same one.
#pragma once

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 12
#define FLINT_HAS_CLONES
#define FLINT_CLONES \
  __attribute__((noinline, target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define FLINT_CLONES __attribute__((noinline))
#endif
