// The least that an operator can pay for a hook beneath autograd: a fallback that runs it, and hides what it calls.

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

namespace {

constexpr auto kKey = c10::DispatchKey::Fake;

void redispatched(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard hidden(kKey);
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, Fake, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&redispatched>()); }

// The calling thread takes part, or not.
extern "C" __attribute__((visibility("default"))) void redispatch_include(int takes_part) {
  c10::impl::tls_set_dispatch_key_included(kKey, takes_part != 0);
}
