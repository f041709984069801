// SPDX-License-Identifier: MIT
// g4prefill: entry of the proc-address table of our additions (g4-ext.h describes the functions).

#pragma once

// Address of the function called `name`, or nullptr when it is none of ours.
void * g4_cuda_proc_address(const char * name);
