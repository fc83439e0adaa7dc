// The recorder's types and functions as Python has them.

#pragma once

#include "code_calls.h"

#include <cstdint>
#include <memory>

namespace opreplay {

// A function that waits, without the interpreter's lock, until the calling thread is to write. Nothing in it is to be
// undone: where the interpreter ends meanwhile, the thread ends in its middle.
inline py::object waiting(Flushing& flushing) {
  static PyMethodDef definition = {"wait",
                                   [](PyObject* self, PyObject*) -> PyObject* {
                                     auto* of = static_cast<Flushing*>(PyCapsule_GetPointer(self, nullptr));
                                     PyThreadState* const state = PyEval_SaveThread();
                                     Flushing::wait(of);
                                     PyEval_RestoreThread(state);
                                     Py_RETURN_NONE;
                                   },
                                   METH_NOARGS, nullptr};
  const auto capsule = py::reinterpret_steal<py::object>(PyCapsule_New(&flushing, nullptr, nullptr));
  return py::reinterpret_steal<py::object>(PyCFunction_New(&definition, capsule.ptr()));
}

// Of a storage that was born on the hot path: its entry, id and bytes, a sample of it as it was then if nothing was
// written to it since (else None), and whether generated code allocated it. None for any other.
inline py::object adopted(const std::shared_ptr<Session>& session, uintptr_t address) {
  const auto found = session->adopt(reinterpret_cast<c10::StorageImpl*>(address));
  if (!found) {
    return py::none();
  }
  const py::object sampled = found->unwritten ? py::object(py::bytes(found->sampled)) : py::none();
  return py::make_tuple(Entry(session, address, found->id), found->id, found->bytes, sampled, found->generated);
}

// A module of the types that Python needs.
inline py::object python_types() {
  py::module_ scope = py::module_::import("types").attr("ModuleType")("opreplay_recorder");
  py::class_<Flushing>(scope, "Flushing", py::module_local())
      .def("expect", &Flushing::expect)
      .def("wake", &Flushing::wake)
      .def_property_readonly("wait", &waiting);
  scope.def("key_guard", &key_guard);
  scope.def("sees", [] {
    return c10::impl::tls_is_dispatch_key_included(kKey) && !c10::impl::tls_is_dispatch_key_excluded(kKey);
  });
  py::class_<Rows>(scope, "Rows", py::module_local())
      .def("__len__", &Rows::length)
      .def("append", &Rows::append)
      .def("part", &Rows::part)
      .def("drop", &Rows::drop);
  py::class_<GeneratedKernel, std::shared_ptr<GeneratedKernel>>(scope, "GeneratedKernel", py::module_local())
      .def("caller", &kernel_caller)
      .def("learn", &learn_kernel);
  py::class_<Entry>(scope, "Entry", py::module_local())
      .def("find", &Entry::find)
      .def("view", &Entry::view)
      .def("views", &Entry::views)
      .def("written", &Entry::written)
      .def("clear_written", &Entry::clear_written)
      .def("note_written", &Entry::note_written)
      .def("offer", &Entry::offer)
      .def("withdraw", &Entry::withdraw)
      .def("watch", &Entry::watch)
      .def("forget", &Entry::forget)
      .def("unmark", &Entry::unmark)
      .def_property("content", &Entry::content, &Entry::set_content);
  py::class_<Session, std::shared_ptr<Session>>(scope, "Session", py::module_local())
      .def(py::init<int64_t, size_t, bool, int64_t>())
      .def_readonly("rows", &Session::rows)
      .def_readonly("new_storages", &Session::new_storages)
      .def_readonly("definitions", &Session::definitions)
      .def("add_storage", &Session::add_storage)
      .def("define_tensor", &Session::define_tensor)
      .def_readonly("flushing", &Session::flushing)
      .def_property(
          "hot", [](Session& self) { return self.hot.load(); }, &Session::set_hot)
      .def_readonly("new_metas", &Session::new_metas)
      .def("define_meta", &Session::define_meta)
      .def("meta_of", &Session::meta_id_of)
      .def("meta", &Session::meta)
      .def("track",
           [](const std::shared_ptr<Session>& self, uintptr_t address, int64_t id, int64_t bytes) {
             self->track(reinterpret_cast<c10::StorageImpl*>(address), id, bytes);
             return Entry(self, address, id);
           })
      .def("adopt", &adopted)
      .def_static("content_hash",
                  [](uintptr_t address, size_t bytes) {
                    return ContentHash::of(reinterpret_cast<const void*>(address), bytes);
                  })
      .def_static("allocated", &allocated_by_torch)
      .def_property_readonly_static("watches", [](const py::object&) { return true; })
      .def("unadopted", &Session::unadopted)
      .def("overlapping", &Session::overlapping)
      .def_property_readonly("drains", &Session::drains_now)
      .def("dead", &Session::dead)
      .def_property(
          "release_head", [](Session& self) { return self.release_head.load(); },
          [](Session& self, int64_t head) { self.release_head = head; })
      .def("note_drawn", &Session::note_drawn)
      .def("drawn_state", &Session::drawn_state)
      .def("settle", [](Session& self) { self.stated.settle(); })
      .def("unsettle", &Session::unsettle)
      .def_property("grad_mode", &Session::stated_grad_mode, &Session::begin_grad_mode)
      .def("state_grad_mode", &Session::state_grad_mode)
      .def("append_op", &Session::append_op)
      .def("reserve_draws", &Session::reserve_draws)
      .def("release_draws", &Session::release_draws)
      .def("being_written", &Session::being_written)
      .def("set_context", &Session::set_context)
      .def("watch_streams", [](Session& self, const at::Device& device) { self.streams.watch(device); })
      .def("cover",
           [](Session& self, uintptr_t enter, uintptr_t leave) {
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
