// The only header that bindgen reads. Feature `llama` defines G4_LLAMA.
#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "gguf.h"
#ifdef G4_LLAMA
#include "llama.h"
#endif
