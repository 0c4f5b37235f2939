"""Replace operators by equivalent operators that integer kernels support.

`join_slices` writes one SpaceToDepth in place of several strided slices and the Concat that joins them along the
channels. The "focus" layer at the start of some detectors consists of eight Slices and a Concat. A runtime copies
strided slices element by element before any layer can start. In a YOLOX-Nano, this takes 0.6 ms of 11 ms, and
SpaceToDepth takes 0.14 ms.

`fold_affine` folds products and sums with constants into the weights and bias of the preceding layer. Exporters write a
learnt scale, a bias or a normalization as separate nodes: Conv, Mul, Add. ONNX Runtime folds constants with one value
per channel, but not a single value for all channels. Each node that remains is quantized separately, which takes time
and rounds to 8 bits once more.

`plain_gemms` brings Gemm into the form that quantizers accept: no factors, one bias for each output, and weights that
all layers read in the same direction.

    Y = alpha A B + beta C        C of any shape that broadcasts to Y

ONNX Runtime's quantizer accepts C of shape [outputs] and fails on all others. alpha and beta have no integer form. If
one layer reads B unchanged and another reads it transposed, the same scales per output cannot fit both.

`write_global_pools` replaces means over whole images by GlobalAveragePool. Exporters write the average of each channel
(squeeze and excitation, the head of a classifier) as a ReduceMean over the spatial axes. GlobalAveragePool computes the
same result and has int8 kernels. ReduceMean has none, so the whole tensor would be converted to float.

`write_whole_pools` replaces each AveragePool whose window is the whole image by GlobalAveragePool. In some formats, an
AveragePool keeps the scale of its input, and only the result of a GlobalAveragePool has a scale of its own.

`write_hard_sigmoids` replaces hard sigmoids that consist of several nodes by one operator:

    HardSigmoid(x) = max(0, min(1, alpha x + beta)) = Clip(x + b, 0, m) / m        alpha = 1 / m, beta = b / m

A hard swish is x HardSigmoid(x). Exporters write its division after the product: x Clip(x + 3, 0, 6) / 6. If the steps
stay separate nodes, each is quantized separately, which takes time and rounds to 8 bits again.

`widen_half` replaces 16-bit floats by float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgeq.model.edit import Editor, insert_behind, replace_node, replace_value, rewrite_nodes
from edgeq.model.fold import fold_into
from edgeq.model.graph import (
    clamp_bounds,
    constant,
    constant_tensor,
    geometry,
    is_op,
    maker,
    node_input,
    only_reader,
)
from edgeq.model.tensors import Array, float_constant, output_channels, set_parameter

_HEIGHT, _WIDTH = 2, 3


@dataclass(frozen=True)
class _Blocks:
    """Describe a Concat of all phases of `source`. A phase is the tensor sampled with a stride of `size` on both image
    axes, starting at one row and column. `order[p]` is the index of the Concat's input with phase p = row * size +
    column.
    """

    source: ir.Value
    size: int
    order: tuple[int, ...]


def join_slices(model: ir.Model) -> int:
    """Replace every Concat of all phases of a tensor by SpaceToDepth, in place. The Slices stay in the graph, but no
    node reads them. Results do not change.

    If the phases are not in the order of SpaceToDepth, edgeq reorders the input channels of the convolutions that read
    them. If any other node reads such phases, the Concat stays.

    Returns:
        The number of Concats that were replaced.
    """
    concats = [(node, graph, _blocks(node)) for graph in model.graphs() for node in graph if is_op(node, "Concat")]
    return sum(_join(node, blocks, Editor(model, graph)) for node, graph, blocks in concats if blocks is not None)


def _join(concat: ir.Node, blocks: _Blocks, editor: Editor) -> bool:
    joined = concat.outputs[0]
    in_order = blocks.order == tuple(range(len(blocks.order)))
    layers = [use.node for use in joined.uses()]
    if not in_order and (joined.is_graph_output() or not all(_can_take(layer, joined, blocks) for layer in layers)):
        return False
    node = ir.node("SpaceToDepth", [blocks.source], {"blocksize": blocks.size}, name=concat.name)
    editor.graph.insert_before(concat, node)
    packed = node.outputs[0]
    packed.type, packed.shape = joined.type, joined.shape
    if in_order:
        replace_value(joined, packed, keep_name=True)
        return True
    # The tensor gets a new name, because its channels are in another order.
    packed.name = editor.free_value_name(f"{joined.name}/space_to_depth")
    for layer in layers:
        weight = float_constant(layer.inputs[1])
        assert weight is not None
        parts = np.split(weight, len(blocks.order), axis=1)
        set_parameter(editor, layer, 1, np.concatenate([parts[i] for i in blocks.order], axis=1))
        layer.replace_input_with(0, packed)
    return True


def _blocks(concat: ir.Node) -> _Blocks | None:
    phases, sources = [], set()
    if concat.domain != "" or concat.attributes.get_int("axis", 0) not in (1, -3):
        return None
    for value in concat.inputs:
        source, phase = _phase(value)
        sources.add(source)
        phases.append(phase)
    source = sources.pop() if len(sources) == 1 else None
    size = round(len(phases) ** 0.5)
    grid_phases = [{_HEIGHT: (row, size), _WIDTH: (column, size)} for row in range(size) for column in range(size)]
    if (
        source is None
        or source.shape is None
        or len(source.shape) != 4
        or size < 2
        or source.dtype != ir.DataType.FLOAT
    ):
        return None
    if any(phases.count(phase) != 1 for phase in grid_phases) or len(phases) != len(grid_phases):
        return None
    return _Blocks(source, size, tuple(phases.index(phase) for phase in grid_phases))


def _phase(value: ir.Value | None) -> tuple[ir.Value | None, dict[int, tuple[int, int]]]:
    """Return the source of a sliced value, and (start, step) for each axis. Slices that end before the end of an axis
    are not followed.
    """
    offsets: dict[int, tuple[int, int]] = {}
    while value is not None:
        node = value.producer()
        if node is None or node.op_type != "Slice" or node.domain != "" or len(node.inputs) != 5:
            break
        arguments = [constant(v) for v in node.inputs[1:]]
        source = node.inputs[0]
        if source is None or source.shape is None or any(values is None for values in arguments):
            break
        starts, ends, axes, steps = (values.ravel().tolist() for values in arguments if values is not None)
        rank = len(source.shape)
        reaches_end = all(end >= _covering_end(source.shape[axis % rank]) for end, axis in zip(ends, axes, strict=True))
        if not reaches_end or any(axis % rank in offsets for axis in axes):
            break
        offsets.update({axis % rank: (start, step) for axis, start, step in zip(axes, starts, steps, strict=True)})
        value = source
    return value, offsets


def _covering_end(size: int | ir.SymbolicDim) -> int:
    """Return the smallest end that covers the whole axis."""
    return size if isinstance(size, int) else 2**31 - 1


def _can_take(layer: ir.Node, joined: ir.Value, blocks: _Blocks) -> bool:
    """Return whether `layer` is an ungrouped convolution with constant weights that reads `joined` as its data and
    nowhere else.
    """
    is_ungrouped = layer.op_type == "Conv" and layer.domain == "" and layer.attributes.get_int("group", 1) == 1
    if not is_ungrouped or layer.inputs[0] is not joined or list(layer.inputs).count(joined) > 1:
        return False
    weight = float_constant(layer.inputs[1])
    return weight is not None and weight.ndim == 4 and weight.shape[1] % len(blocks.order) == 0


_LAYERS = ("Conv", "ConvTranspose", "Gemm")
_STEPS = ("Mul", "Div", "Add", "Sub")


def fold_affine(model: ir.Model) -> int:
    """Fold every Mul, Div, Add and Sub with a constant into the preceding layer, in place. The layer must be a Conv,
    ConvTranspose or Gemm with constant weights.

    The constant must be one number, or one for each channel, and the folded node must be the only reader of the layer's
    result. The layer keeps its name, and its result takes over the name of the last folded result. New weights are
    computed in float64 and stored in their old type.

    Returns:
        The number of nodes that were folded.
    """
    return rewrite_nodes(model, _fold, *_STEPS)  # After a fold, the next node reads the layer's result.


def _layer(step: ir.Node) -> ir.Node | None:
    """Return the layer whose result is read only by `step`, a node with a constant operand. Return None if there is no
    such layer.
    """
    for place, value in enumerate(step.inputs[:2]):
        producer = value.producer() if value is not None else None
        if value is not None and producer is not None and is_op(producer, *_LAYERS) and only_reader(value) is step:
            return producer if float_constant(step.inputs[1 - place]) is not None else None
    return None


def _fold(step: ir.Node, editor: Editor) -> bool:
    layer = _layer(step)
    if layer is None or layer.graph is not step.graph:
        return False
    result = layer.outputs[0]
    number = _by_channel(layer, float_constant(step.inputs[1 if step.inputs[0] is result else 0]))
    if number is None:
        return False
    ones: Array = np.ones(len(number))
    factor, shift = ones, 0 * ones
    if step.op_type == "Mul":
        factor = number
    elif step.op_type == "Div":
        if step.inputs[0] is not result or not number.all():
            return False
        factor = 1 / number
    elif step.op_type == "Add":
        shift = number
    else:
        factor, shift = (ones, -number) if step.inputs[0] is result else (-ones, number)
    # A zero factor would leave weights without a scale, and an overflow would make them infinite.
    if not (factor.all() and np.isfinite(factor).all() and np.isfinite(shift).all()):
        return False
    if fold_into(editor, layer, factor, shift):
        return False
    replace_node(step, result)
    return True


def _by_channel(layer: ir.Node, values: Array | None) -> Array | None:
    """Return, as float64[channels], a constant that broadcasts to the layer's result. Return None if it varies along
    another axis.
    """
    weight = layer.inputs[1]
    if values is None or weight is None or weight.shape is None or not weight.shape.is_static():
        return None
    sizes = weight.shape.numpy()
    channels, rank = output_channels(layer, sizes), len(sizes)
    if values.ndim > rank or values.size not in (1, channels):
        return None
    shape = (1,) * (rank - values.ndim) + values.shape
    return np.broadcast_to(values.ravel(), (channels,)) if values.size == 1 or shape[1] == channels else None


def plain_gemms(model: ir.Model, *, add_nodes: bool = True) -> int:
    """Bring every Gemm with constant weights into the form that quantizers accept, in place. Results stay the same to
    float32's accuracy.

    Args:
        add_nodes: whether to move a bias that differs from row to row into a separate Add. If not, such a bias stays.

    Returns:
        The number of nodes that were changed.
    """
    changed = 0
    for graph in model.graphs():
        layers = [node for node in graph if is_op(node, "Gemm", "MatMul") and _is_matrix(node_input(node, 1))]
        editor = Editor(model, graph)
        for node in layers:
            if node.op_type == "Gemm":
                changed += any([_fold_factors(node, editor), _fit_bias(node, editor, add_nodes)])
        changed += _copy_transposed(layers, editor)
    return changed


def gemms_with_factors(model: ir.Model) -> frozenset[str]:
    """Return the names of the Gemm nodes of the main graph whose alpha or beta is not 1."""
    gemms = (node for node in model.graph if is_op(node, "Gemm"))
    return frozenset(
        node.name or "" for node in gemms if any(node.attributes.get_float(f, 1.0) != 1.0 for f in ("alpha", "beta"))
    )


def _is_matrix(value: ir.Value | None) -> bool:
    """Return whether a value is a constant matrix. Its data, which may be large, is not read."""
    is_weight = value is not None and value.is_initializer() and not value.is_graph_input()
    return is_weight and value is not None and value.shape is not None and len(value.shape) == 2


def _fold_factors(node: ir.Node, editor: Editor) -> bool:
    alpha, beta = node.attributes.get_float("alpha", 1.0), node.attributes.get_float("beta", 1.0)
    bias_input = node_input(node, 2)
    bias = float_constant(bias_input) if beta != 1.0 else None
    weight = float_constant(node.inputs[1]) if alpha != 1.0 else None
    unknown = (alpha != 1.0 and weight is None) or (beta != 1.0 and bias_input is not None and bias is None)
    if alpha == beta == 1.0 or unknown:
        return False
    if weight is not None:
        set_parameter(editor, node, 1, weight * alpha)
    if bias is not None:
        set_parameter(editor, node, 2, bias * beta)
    node.attributes.pop("alpha", None)
    node.attributes.pop("beta", None)
    return True


def _fit_bias(node: ir.Node, editor: Editor, add_nodes: bool) -> bool:
    weight, bias_input = node.inputs[1], node_input(node, 2)
    assert weight is not None
    assert weight.shape is not None
    bias = float_constant(bias_input)
    outputs = output_channels(node, weight.shape.numpy())
    if bias_input is None or bias is None or bias.shape == (outputs,):
        return False
    if bias.size == 1 or (bias.size == outputs and bias.shape[-1] == outputs):
        set_parameter(editor, node, 2, np.broadcast_to(bias.ravel(), (outputs,)))
        return True
    if not add_nodes:
        return False
    # The bias differs from row to row, so a separate Add must add it.
    product = node.outputs[0]
    name = editor.free_value_name(f"{product.name}/product")
    node.resize_inputs(2)
    added = editor.node("Add", [product, bias_input], f"{node.name}/bias", after=node)
    insert_behind(product, added, added, name)
    product.type, product.shape = added.type, added.shape
    return True


def _copy_transposed(layers: list[ir.Node], editor: Editor) -> int:
    """Give a copy of the weights to each layer that reads them in a direction other than that of the first reader.
    Return the number of copies.
    """
    directions: dict[ir.Value | None, int] = {}
    changed = 0
    for node in layers:
        value = node.inputs[1]
        transposed = node.attributes.get_int("transB", 0) if node.op_type == "Gemm" else 0
        if directions.setdefault(value, transposed) != transposed and (weight := float_constant(value)) is not None:
            set_parameter(editor, node, 1, weight)
            changed += 1
    return changed


# Types of layers. Their input is quantized anyway, whereas a mean before a normalization should stay in float.
_READERS = ("Conv", "Gemm", "MatMul")
_CARRIERS = ("Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
# Smallest number of axes of a mean. Only images qualify, because a mean over one axis may be a normalization over
# channels, which are the last axis in transformers.
_MIN_AXES = 2


def write_global_pools(model: ir.Model) -> int:
    """Replace every ReduceMean over all axes except the first two by GlobalAveragePool, in place. The input must have
    at least four axes, and only layers may read the result. If the ReduceMean does not keep the axes, a Flatten
    follows.

    Returns:
        The number of nodes that were replaced.
    """
    return rewrite_nodes(model, _write_pool, "ReduceMean")


def _write_pool(mean: ir.Node, editor: Editor) -> bool:
    source, result = mean.inputs[0], mean.outputs[0]
    if source is None or source.shape is None or source.dtype != ir.DataType.FLOAT:
        return False
    rank = len(source.shape)
    if rank < 2 + _MIN_AXES or _axes(mean, rank) != list(range(2, rank)):
        return False
    if not _leads_to_layers(result):
        return False
    keeps = mean.attributes.get_int("keepdims", 1)
    pooled = editor.node("GlobalAveragePool", [source], f"{mean.name}/pool", before=mean)
    pool = maker(pooled)
    if keeps:
        pooled.shape, pooled.type = result.shape, result.type
    else:
        pooled.shape, pooled.type = ir.Shape([*source.shape[:2], *[1] * (rank - 2)]), source.type
        pooled = editor.node("Flatten", [pooled], f"{mean.name}/flatten", before=mean, like=result)
    replace_node(mean, pooled)
    pool.name = mean.name  # Options such as --exclude use this name.
    return True


def write_whole_pools(model: ir.Model) -> int:
    """Replace every AveragePool with one window, which covers its whole input, by GlobalAveragePool, in place. Results
    do not change.

    Returns:
        The number of nodes that were replaced.
    """
    return rewrite_nodes(model, _write_whole_pool, "AveragePool")


def _write_whole_pool(pool: ir.Node, editor: Editor) -> bool:
    source, kernel = pool.inputs[0], tuple(pool.attributes.get_ints("kernel_shape", ()))
    if source is None or source.shape is None or tuple(source.shape[2:]) != kernel:
        return False
    window = geometry(pool, kernel, kernel)
    if any(map(any, window.pads)) or set(window.dilations) != {1}:
        return False
    pooled = editor.node("GlobalAveragePool", [source], f"{pool.name}/whole", before=pool, like=pool.outputs[0])
    replace_node(pool, pooled)
    maker(pooled).name = pool.name  # Options such as --exclude use this name.
    return True


def _leads_to_layers(value: ir.Value) -> bool:
    """Return whether only layers read a value, directly or after nodes that reshape it."""
    if value.is_graph_output() or not value.uses():
        return False
    nodes = [use.node for use in value.uses()]
    return all(is_op(n, *_READERS) or (is_op(n, *_CARRIERS) and _leads_to_layers(n.outputs[0])) for n in nodes)


def _axes(mean: ir.Node, rank: int) -> list[int]:
    """Return the axes that a ReduceMean reduces, sorted. Return [] if they are computed or left out. (If they are left
    out, all axes are reduced.)
    """
    axes_input = node_input(mean, 1)
    values = constant(axes_input) if axes_input is not None else None
    axes = (
        mean.attributes.get_ints("axes", [])
        if axes_input is None
        else []
        if values is None
        else values.ravel().tolist()
    )
    return sorted(axis % rank for axis in axes)


# Relative tolerance for m. Exporters store m as 6, or its reciprocal as 1 / 6 in float32.
_TOLERANCE = 1e-6


def write_hard_sigmoids(model: ir.Model) -> int:
    """Convert every Clip(x + b, 0, m) that is followed by a Div by m or a Mul by 1 / m to a HardSigmoid, in place. A
    product may be in between. Results stay the same to float32's accuracy.

    Returns:
        The number of hard sigmoids that were replaced.
    """
    return rewrite_nodes(model, _write_hard_sigmoid, "Clip")


def _write_hard_sigmoid(clip: ir.Node, editor: Editor) -> bool:
    low, high = clamp_bounds(clip) or (math.nan, math.nan)
    sum_of = clip.inputs[0]
    added = sum_of.producer() if sum_of is not None else None
    if added is None or sum_of is None or not is_op(added, "Add") or low != 0 or not 0 < high < math.inf:
        return False
    operand, offset = _with_number(added)
    reader = only_reader(clip.outputs[0])
    if operand is None or only_reader(sum_of) is not clip or reader is None:
        return False
    divided, product = reader, None
    if is_op(reader, "Mul") and _with_number(reader)[0] is None:
        product, next_reader = reader, only_reader(reader.outputs[0])
        if next_reader is None:
            return False
        divided = next_reader
    if not math.isclose(_factor(divided), 1 / high, rel_tol=_TOLERANCE):
        return False
    attributes = {"alpha": 1 / high, "beta": offset / high}
    result = clip.outputs[0]
    gate = editor.node(
        "HardSigmoid", [operand], f"{clip.name}/hard_sigmoid", before=clip, like=result, attributes=attributes
    )
    if product is not None:
        product.replace_input_with(list(product.inputs).index(result), gate)
    replace_value(divided.outputs[0], gate if product is None else product.outputs[0], keep_name=True)
    editor.graph.remove([divided, clip, added], safe=True)
    return True


def _with_number(node: ir.Node) -> tuple[ir.Value | None, float]:
    """For a node with a float32 scalar, return the other operand and the scalar. The operand is None if neither input
    is a float32 scalar. Other types do not count, because onnxruntime has HardSigmoid only in float32.
    """
    for place in (0, 1):
        tensor = constant_tensor(node.inputs[place])
        if tensor is not None and tensor.dtype == ir.DataType.FLOAT and tensor.size == 1 and len(tensor.shape) <= 1:
            return node.inputs[1 - place], float(tensor.numpy().reshape(()))
    return None, 0.0


def _factor(node: ir.Node) -> float:
    """Return the factor of a Mul or Div by a scalar; NaN for other nodes."""
    operand, number = _with_number(node)
    if operand is None or not number:
        return math.nan
    if is_op(node, "Mul"):
        return number
    return 1 / number if is_op(node, "Div") and node.inputs[0] is operand else math.nan


_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_TYPE_ATTRIBUTES = ("to", "dtype")


def widen_half(model: ir.Model) -> int:
    """Replace all computation in float16 or bfloat16 by float32, in place.

    Inputs and outputs of the model keep their types: a Cast follows each 16-bit input and precedes each 16-bit output.
    Constant nodes must have been turned into initializers before.

    Returns:
        The number of widened weights. It is 0 if the model has no 16-bit floats; then nothing changes.
    """
    widened = 0
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.dtype in _HALF and value.const_value is not None:
                array = np.asarray(value.const_value.numpy()).astype(np.float32)
                value.const_value = ir.tensor(array, name=value.name)
                value.dtype = ir.DataType.FLOAT
                widened += 1
        for node in graph:
            _widen_attributes(node)
            for output in node.outputs:
                if output.dtype in _HALF and not (output.is_graph_output() and graph is model.graph):
                    output.dtype = ir.DataType.FLOAT
        if graph is not model.graph:
            for value in graph.inputs:
                if value.dtype in _HALF:
                    value.dtype = ir.DataType.FLOAT
    editor = Editor(model)
    _cast_inputs(model.graph, editor)
    _cast_outputs(model.graph, editor)
    return widened


def _widen_attributes(node: ir.Node) -> None:
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.INT and name in _TYPE_ATTRIBUTES and attribute.as_int() in _HALF:
            node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.FLOAT))
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in _HALF:
            array = np.asarray(attribute.as_tensor().numpy()).astype(np.float32)
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(array))


def _cast_inputs(graph: ir.Graph, editor: Editor) -> None:
    first_node = graph[0] if len(graph) else None
    for value in graph.inputs:
        if value.dtype in _HALF and value.uses():
            wide = _cast(editor, value, f"{value.name}_float32", ir.DataType.FLOAT, successor=first_node)
            value.replace_all_uses_with(wide)
            maker(wide).replace_input_with(0, value)


def _cast_outputs(graph: ir.Graph, editor: Editor) -> None:
    for index, value in enumerate(graph.outputs):
        name, dtype = str(value.name), value.dtype
        if dtype in _HALF and value.producer() is not None:
            value.dtype = ir.DataType.FLOAT
            value.name = editor.free_value_name(f"{name}_float32")
            narrow = _cast(editor, value, name, dtype)
            narrow.name = name
            graph.outputs[index] = narrow


def _cast(
    editor: Editor, source: ir.Value, name: str, dtype: ir.DataType, successor: ir.Node | None = None
) -> ir.Value:
    to = {"to": int(dtype)}
    return editor.node(
        "Cast", [source], f"{name}_cast", output=name, before=successor, like=source, dtype=dtype, attributes=to
    )
