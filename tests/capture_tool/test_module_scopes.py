"""`--module-scopes`: calls of modules are scopes named by their path under the root."""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from replayfmt.recording.program.module_scopes import ModuleScopes


class Log:
    def __init__(self):
        self.on = True
        self.events = []

    def present(self):
        return self.on

    def module_scope_begin(self, name):
        self.events.append(f"+{name}")

    def module_scope_end(self, name):
        self.events.append(f"-{name}")

    def take(self):
        taken, self.events[:] = list(self.events), []
        return taken


@pytest.fixture
def log():
    log = Log()
    scopes = ModuleScopes(log)
    scopes.install()
    yield log
    scopes.remove()
    scopes.remove()
    log.take()
    nn.Identity()(1)
    assert log.take() == []


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.Tanh()
        self.error = None

    def forward(self, x):
        if self.error is not None:
            raise self.error
        return self.attention(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.extra = None
        self.function = lambda x: x

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.function(x if self.extra is None else self.extra(x))


ONE_CALL = [
    "+Model",
    "+layers.0",
    "+layers.0.attention",
    "-layers.0.attention",
    "-layers.0",
    "+layers.1",
    "+layers.1.attention",
    "-layers.1.attention",
    "-layers.1",
    "-Model",
]


def test_scopes_are_paths_under_the_root_module_and_the_root_goes_by_its_class(log):
    Model()(torch.ones(1))
    assert log.take() == ONE_CALL


def test_a_part_keeps_its_path_when_it_is_called_on_its_own_later(log):
    model = Model()
    model.layers[0](torch.ones(1))
    assert log.take() == ["+Block", "+attention", "-attention", "-Block"]
    model(torch.ones(1))
    assert log.take() == ONE_CALL
    model.layers[1](torch.ones(1))
    assert log.take() == ["+layers.1", "+layers.1.attention", "-layers.1.attention", "-layers.1"]


def test_checkpointed_parts_have_their_path_in_the_backward_pass(log):
    model, x = Model(), torch.ones(1, requires_grad=True)
    model(x)
    log.take()
    y = checkpoint(model.layers[0], x, use_reentrant=False)
    forward = log.take()
    y.sum().backward()
    assert log.take() == forward == ["+layers.0", "+layers.0.attention", "-layers.0.attention", "-layers.0"]


def test_modules_added_or_made_on_the_way_have_names_too(log):
    model = Model()
    model(torch.ones(1))
    log.take()
    model.extra = nn.Sequential(nn.ReLU())
    model(torch.ones(1))
    assert log.take()[-5:] == ["+extra", "+extra.0", "-extra.0", "-extra", "-Model"]
    model.function = lambda x: nn.GELU()(x)
    model(torch.ones(1))
    assert log.take()[-3:] == ["+GELU", "-GELU", "-Model"]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_scopes_end_when_forward_raises(log, error):
    model = Model()
    model.layers[1].error = error
    with pytest.raises(type(error)):
        model(torch.ones(1))
    assert isinstance(error, Exception) is (len(log.events) == 8)
    model.layers[1].error = None
    model(torch.ones(1))
    # For an interrupt PyTorch calls no hooks: what was left behind ends when the next module is called.
    assert log.take() == [*ONE_CALL[:6], "-layers.1", "-Model", *ONE_CALL]


def test_each_thread_has_its_own_stack_and_nothing_is_named_while_nobody_is_there(log):
    model = Model()
    thread = threading.Thread(target=lambda: nn.GELU()(torch.ones(1)))

    def meanwhile(x):
        thread.start()
        thread.join()
        return x

    model.function = meanwhile
    model(torch.ones(1))
    assert log.take()[-4:] == ["-layers.1", "+GELU", "-GELU", "-Model"]
    model.function = abs
    log.on = False
    model(torch.ones(1))
    assert log.take() == []


def test_modules_and_arguments_are_not_kept_alive(log):
    model, x = Model(), torch.ones(1)
    references = weakref.ref(model), weakref.ref(x)
    model(x)
    del model, x
    gc.collect()
    assert [reference() for reference in references] == [None, None]


@pytest.mark.slow
def test_compiled_modules_still_compile_whole(log):
    model = Model()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.warns(UserWarning, match="global hooks"):  # what PyTorch says of any such hook
        assert compiled(torch.ones(1)).item() == torch.ones(1).tanh().tanh().item()
    assert not any("layers" in event for event in log.take())
    torch._dynamo.reset()
