// The recorder's types and functions as Python has them.

#pragma once

#include "code_calls.h"

#include <cstdint>
#include <memory>

namespace opreplay {

// A module of the types that Python needs.
inline py::object python_types() {
  py::module_ scope = py::module_::import("types").attr("ModuleType")("opreplay_recorder");
  py::class_<Flushing>(scope, "Flushing", py::module_local())
      .def("expect", &Flushing::expect)
      .def("wake", &Flushing::wake)
      // The addresses of `wait` and of its argument.
      .def_property_readonly("waiting", [](Flushing& self) {
        return py::make_tuple(reinterpret_cast<uintptr_t>(&Flushing::wait), reinterpret_cast<uintptr_t>(&self));
      });
  scope.def("key_guard", &key_guard);
  py::class_<Rows>(scope, "Rows", py::module_local())
      .def("__len__", &Rows::length)
      .def("append", &Rows::append)
      .def("first", &Rows::first)
      .def("drop", &Rows::drop);
  py::class_<Counter>(scope, "Counter", py::module_local())
      .def("__iter__", [](py::object self) { return self; })
      .def("__next__", &Counter::next);
  py::class_<GeneratedKernel, std::shared_ptr<GeneratedKernel>>(scope, "GeneratedKernel", py::module_local())
      .def("caller", &kernel_caller)
      .def("learn", &learn_kernel);
  py::class_<Session, std::shared_ptr<Session>>(scope, "Session", py::module_local())
      .def(py::init<int64_t, size_t, bool>())
      .def_readonly("rows", &Session::rows)
      .def_readonly("new_storages", &Session::new_storages)
      .def_readonly("definitions", &Session::definitions)
      .def_readonly("next_storage", &Session::next_storage)
      .def_readonly("next_tensor", &Session::next_tensor)
      .def_readonly("flushing", &Session::flushing)
      .def_property("hot", [](Session& self) { return self.hot.load(); }, &Session::set_hot)
      .def_readonly("new_metas", &Session::new_metas)
      .def("define_meta", &Session::define_meta)
      .def("meta", &Session::meta)
      .def("publish", &Session::publish)
      .def("view", &Session::view)
      .def("take", &Session::take)
      .def("take_written", &Session::take_written)
      .def("content", &Session::content)
      .def("set_content", &Session::set_content)
      .def_static("content_hash", [](uintptr_t address, size_t bytes) {
             return ContentHash::of(reinterpret_cast<const void*>(address), bytes);
           })
      .def_static("allocated", &allocated_by_torch)
      .def("unadopted", &Session::unadopted)
      .def("overlapping", &Session::overlapping)
      .def("drains", &Session::drains_now)
      .def("dead", &Session::dead)
      .def_property("release_head", [](Session& self) { return self.release_head.load(); },
                    [](Session& self, int64_t head) { self.release_head = head; })
      .def("note_drawn", &Session::note_drawn)
      .def("drawn_state", &Session::drawn_state)
      .def("settle", [](Session& self) { self.stated.settle(); })
      .def("unsettle", &Session::unsettle)
      .def("begin_grad_mode", &Session::begin_grad_mode)
      .def("state_grad_mode", &Session::state_grad_mode)
      .def("stated_grad_mode", &Session::stated_grad_mode)
      .def("append_op", &Session::append_op)
      .def("reserve_draws", &Session::reserve_draws)
      .def("release_draws", &Session::release_draws)
      .def("being_written", &Session::being_written)
      .def("set_context", &Session::set_context)
      .def("watch_streams", [](Session& self, const at::Device& device) { self.streams.watch(device); })
      .def("forget_marked", &Session::forget_marked)
      .def("cover", [](Session& self, uintptr_t enter, uintptr_t leave) {
             self.enter = reinterpret_cast<void (*)()>(enter);
             self.leave = reinterpret_cast<void (*)()>(leave);
           })
      .def("noted_region", &noted_region)
      .def("generated_kernel", &generated_kernel)
      .def("allocator", &allocator)
      .def("clear", &Session::clear)
      .def("forked", &Session::forked);
  return scope;
}

}  // namespace opreplay
