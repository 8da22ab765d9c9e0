//! Bits of quantization and of products, on the stand-in, against the contract's definitions in `ingle_graph`.

#[path = "shim/bits.rs"]
mod bits;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Mutex;

use bits::{assert_bits, bytes, floats, numbers};
use ingle_cuda::driver::{Buffer, Context, Function, Module, Span, Stream};
use ingle_cuda::kernels::linear::{self, Input, Made, Part};
use ingle_cuda::kernels::quantize::{self, Outputs};
use ingle_cuda::kernels::{Issue, SOURCES};
use ingle_cuda::stand_in::StandIn;
use ingle_cuda::step::StepLayout;
use ingle_cuda::weights::{Matrix, MatrixLayout, Staging};
use ingle_graph::op::{Weight, WeightUse};
use ingle_graph::quantize::{Layout, quantize_row};
use ingle_graph::{Activation, Bucket, Inputs, Rows, reference};
use ingle_tensor::{DType, quant};

/// What runs kernels on this machine, each loaded once.
struct Device {
    stand_in: StandIn,
    context: Context,
    stream: Stream,
    staging: RefCell<Staging>,
    functions: RefCell<BTreeMap<&'static str, Function>>,
}

impl Device {
    /// `None`, with a word about it, where there is no g++.
    fn new() -> Option<Self> {
        Self::of(132)
    }

    /// One of so many multiprocessors.
    fn of(multiprocessors: i32) -> Option<Self> {
        let stand_in = StandIn::new("bits of quantization and products")?;
        stand_in.set_multiprocessors(multiprocessors);
        let context = Context::new(stand_in.driver(), 0).expect("it has a device");
        let (stream, staging) =
            (Stream::new(&context).expect("a stream"), Staging::new(&context, 1 << 20).expect("memory"));
        let (staging, functions) = (RefCell::new(staging), RefCell::default());
        Some(Self { stand_in, context, stream, staging, functions })
    }

    fn buffer(&self, bytes: &[u8]) -> Buffer {
        let buffer = Buffer::new(&self.context, bytes.len()).expect("memory");
        self.stream.write(buffer.all(), bytes).expect("copies");
        buffer
    }

    fn read(&self, span: Span<'_>) -> Vec<u8> {
        let mut bytes = vec![0; span.bytes()];
        self.stream.read(&mut bytes, span).expect("copies");
        bytes
    }

    fn matrix(&self, weight: &Weight, integers: bool, data: &[u8]) -> Matrix {
        let mut staging = self.staging.borrow_mut();
        let layout =
            MatrixLayout::new(weight.dtype, weight.rows, weight.cols, integers).expect("it is a shape");
        let memory = Buffer::new(&self.context, layout.bytes()).expect("there is memory");
        let loaded = Matrix::load(&self.context, &self.stream, &mut staging, memory, weight, integers, data);
        loaded.expect("it is loaded")
    }

    /// Runs launches; twice, in opposite orders of threads, and both must leave the same in these outputs.
    fn run(&self, issues: &[Issue<'_>], outputs: &[Span<'_>]) -> Vec<Vec<u8>> {
        let mut functions = self.functions.borrow_mut();
        let before: Vec<Vec<u8>> = outputs.iter().map(|span| self.read(*span)).collect();
        let [forwards, backwards] = [false, true].map(|reversed| {
            self.stand_in.set_reversed(reversed);
            for (span, bytes) in outputs.iter().zip(&before) {
                self.stream.write(*span, bytes).expect("copies");
            }
            for Issue { entry, shape, arguments } in issues {
                let function = functions.entry(entry.name).or_insert_with(|| {
                    let source = SOURCES.iter().find(|source| source.entries.contains(entry));
                    let source = source.expect("a file has it");
                    let cubin = self.stand_in.compiler().cubin(source, "sm_90a").expect("compiles");
                    let module = Module::load(&self.context, &cubin.bytes).expect("loads");
                    module.function(*entry).expect("it is there")
                });
                function.allow_shared(shape.shared_bytes).expect("the device has as much");
                let launched = self.stream.launch(function, shape, arguments);
                launched.unwrap_or_else(|error| panic!("{error}"));
            }
            outputs.iter().map(|span| self.read(*span)).collect::<Vec<_>>()
        });
        assert!(forwards == backwards, "{}: depends on the order of threads", issues[0].entry.name);
        forwards
    }
}

/// The data of a step of `t` tokens in a bucket with room for `room`.
fn step(t: usize, room: usize) -> Vec<u8> {
    let layout = StepLayout::new(Bucket { t: room, s: 1, r: 1 }, &[]).expect("it fits");
    let (tokens, wanted) = (vec![0; t], vec![0]);
    let inputs =
        Inputs { positions: tokens.clone(), sequences: tokens.clone(), tokens, wanted, ..Inputs::default() };
    let mut blob = vec![0xFF; layout.bytes()];
    layout.fill(&inputs, None, &mut blob).expect("it fits");
    blob
}

/// Rows, and poison in the rest of the bucket.
fn padded(x: &[f32], cols: usize, room: usize) -> Vec<u8> {
    let mut bytes = bytes(x);
    bytes.resize(room * cols * 4, 0xFF);
    bytes
}

/// Rows quantized by the definition; what is beyond them is poison: NaN as scales.
fn quantized(layout: &Layout, x: &[f32]) -> Vec<u8> {
    let mut out = vec![0xFF; layout.bytes()];
    x.chunks(layout.cols).enumerate().for_each(|(row, x)| quantize_row(layout, x, row, &mut out));
    out
}

/// NaN scales as one NaN.
fn canonical(layout: &Layout, bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let scales = layout.scale_offset(0)..layout.scale_offset(layout.rows);
    for scale in bytes[scales].as_chunks_mut::<4>().0 {
        if f32::from_le_bytes(*scale).is_nan() {
            *scale = f32::NAN.to_le_bytes();
        }
    }
    bytes
}

#[test]
fn quantized_values_have_the_bytes_of_the_definition() {
    let Some(device) = Device::new() else { return };
    let (t, room) = (3, 5);
    for cols in [32, 576, 300, 2304, 7] {
        let mut x = numbers(11, t * cols, true);
        // A unit of zeros, one too small, one at the limit.
        for (start, value) in [(0, 0.0), (cols, 1e-31), (2 * cols, f32::from_bits(27 << 23))] {
            x[start..start + cols.min(32)].fill(value);
        }
        let (other, weight) = (numbers(12, t * cols, true), numbers(13, cols, false));
        let blob = device.buffer(&step(t, room));
        let [x_at, other_at] = [&x, &other].map(|x| device.buffer(&padded(x, cols, room)));
        let (weight_at, y_at) = (device.buffer(&bytes(&weight)), device.buffer(&vec![0xFF; room * cols * 4]));
        let layouts = [(32, 1), (64, 2), (128, 2), (256, 1)];
        let layouts = layouts.map(|(unit, digits)| Layout::new(room, cols, unit, digits));
        let to = layouts.map(|layout| device.buffer(&vec![0xFF; layout.bytes()]));
        let pairs: Vec<(Span<'_>, Layout)> = to.iter().map(Buffer::all).zip(layouts).collect();
        let spans: Vec<Span<'_>> = [&y_at].into_iter().chain(&to).map(Buffer::all).collect();
        let check = |issues: &[Issue<'_>], plain: bool, want: &[f32]| {
            let name = issues[0].entry.name;
            let back = device.run(issues, &spans);
            for (got, layout) in back[1..].iter().zip(&layouts) {
                let (got, want) = (canonical(layout, got), canonical(layout, &quantized(layout, want)));
                let at = got.iter().zip(&want).position(|(a, b)| a != b);
                assert_eq!(at, None, "{name}: first byte that differs, {layout:?}");
                assert!(want.iter().any(|&byte| byte != 0xFF), "{name}: nothing was to be written");
            }
            let y = floats(&back[0]);
            let (rows, rest) = y.split_at(if plain { t * cols } else { 0 });
            assert_bits(name, rows, &want[..rows.len()]);
            assert!(rest.iter().all(|y| y.to_bits() == u32::MAX), "{name}: padding");
        };
        let made = quantize::issues(blob.all(), Rows::T, room, cols, x_at.all(), &pairs);
        check(&made.expect("it is planned"), false, &x);
        for f32 in [None, Some(y_at.all())] {
            let outputs = Outputs { f32, quantized: pairs.clone() };
            for act in [Activation::Silu, Activation::GeluTanh, Activation::GeluErf] {
                let both = [x_at.all(), other_at.all()];
                let made = quantize::glu(blob.all(), Rows::T, [room, cols], act, both, &outputs);
                let want = x.iter().zip(&other).map(|(&g, u)| reference::activate(act, g) * u);
                check(&[made.expect("it is planned")], f32.is_some(), &want.collect::<Vec<_>>());
            }
            let from = [x_at.all(), weight_at.all()];
            let made = quantize::norm(blob.all(), Rows::T, [room, cols], 1e-6, from, &outputs);
            let want = x.chunks(cols).flat_map(|x| reference::rms_norm(x, &weight, 1e-6));
            check(&[made.expect("it is planned")], f32.is_some(), &want.collect::<Vec<_>>());
        }
    }
}

/// What a product adds to the sum.
#[derive(Clone, Copy, Debug)]
struct Extras {
    bias: bool,
    scale: bool,
    residual: bool,
}

const EXTRAS: [Extras; 4] = [
    Extras { bias: false, scale: false, residual: false },
    Extras { bias: true, scale: false, residual: true },
    Extras { bias: true, scale: true, residual: false },
    Extras { bias: false, scale: false, residual: true },
];

/// Rows of a matrix that differ.
const MATRIX_ROWS: usize = 42;

/// Rows of a matrix as stored, those that are encoded once over and over: some encoders try a great many codes.
fn stored(dtype: DType, rows: usize, cols: usize) -> Vec<u8> {
    static ENCODED: Mutex<BTreeMap<(&str, usize), Vec<u8>>> = Mutex::new(BTreeMap::new());
    let row_bytes = cols / dtype.block_len() * dtype.block_bytes();
    let mut encoded = ENCODED.lock().expect("no test panicked with it");
    let data = encoded.entry((dtype.name(), cols)).or_insert_with(|| {
        let mut data = vec![0; MATRIX_ROWS * row_bytes];
        let values = numbers(cols as u64, MATRIX_ROWS * cols, false);
        for (row, values) in data.chunks_mut(row_bytes).zip(values.chunks(cols)) {
            assert!(quant::encode_row(dtype, values, row), "{dtype} can be encoded");
        }
        data
    });
    data.iter().copied().cycle().take(rows * row_bytes).collect()
}

/// Products of `t` rows, in a bucket of `room`, with matrices of these rows in one launch.
struct Case {
    dtype: DType,
    cols: usize,
    rows: Vec<usize>,
    t: usize,
    room: usize,
    /// Digits of activations, 0 for f32.
    digits: usize,
    extras: Extras,
}

impl Case {
    /// Compares, and gives the kernel's name.
    fn check(&self, device: &Device) -> &'static str {
        let &Self { dtype, cols, t, room, digits, extras, .. } = self;
        let what =
            format!("{dtype} {:?} x {cols}, {t} of {room} rows, {digits} digits, {extras:?}", self.rows);
        let seed = (t * 31 + digits) as u64;
        let mut x = numbers(seed, t * cols, false);
        // A row that is not finite makes its own outputs NaN and no others.
        if t > 2 {
            x[cols + cols / 2] = if digits == 1 { f32::INFINITY } else { f32::NAN };
        }
        let integers = digits > 0;
        let layout = integers.then(|| Layout::new(room, cols, dtype.block_len(), digits));
        let activations = match &layout {
            Some(layout) => quantized(layout, &x),
            None => padded(&x, cols, room),
        };
        let (blob, x_at) = (device.buffer(&step(t, room)), device.buffer(&activations));
        let scale = extras.scale.then_some(0.37f32);
        let mut matrices = Vec::new();
        let mut wants = Vec::new();
        for &rows in &self.rows {
            let (name, used) = (String::from("w"), WeightUse::Matrix);
            let weight = Weight { name, dtype, rows, cols, used, offset: 0.0 };
            let data = stored(dtype, rows, cols);
            let (bias, residual) = (numbers(seed + 7, rows, false), numbers(seed + 8, t * rows, false));
            matrices.push((
                device.matrix(&weight, integers, &data),
                device.buffer(&bytes(&bias)),
                device.buffer(&padded(&residual, rows, room)),
                device.buffer(&vec![0xFF; room * rows * 4]),
            ));
            let mut want = vec![0.0; t * rows];
            for (n, data) in data.chunks(data.len() / rows).enumerate() {
                let mut integer_row = reference::IntRow::default();
                let mut decoded = vec![0.0; cols];
                match quant::format(dtype).filter(|_| integers) {
                    Some(format) => integer_row.read(data, format),
                    None => quant::decode_row(dtype, data, &mut decoded),
                }
                for row in 0..t {
                    let mut v = match &layout {
                        Some(layout) => integer_row.dot(&activations, layout, row),
                        None => reference::dot(&decoded, &x[row * cols..(row + 1) * cols]),
                    };
                    v = scale.map_or(v, |scale| v * scale);
                    v = if extras.bias { v + bias[n] } else { v };
                    v = if extras.residual { residual[row * rows + n] + v } else { v };
                    want[row * rows + n] = v;
                }
            }
            wants.push(want);
        }
        let parts = matrices.iter().map(|(matrix, bias, residual, y)| Part {
            matrix,
            scale,
            bias: extras.bias.then(|| bias.all()),
            x: match layout {
                Some(layout) => Input::Quantized(x_at.all(), layout),
                None => Input::Floats(x_at.all()),
            },
            residual: extras.residual.then(|| residual.all()),
            y: y.all(),
        });
        let issues =
            linear::issues(blob.all(), Rows::T, room, &parts.collect::<Vec<_>>()).expect("it is planned");
        assert_eq!(issues.len(), 1, "{what}: one launch");
        let outputs = matrices.iter().map(|(.., y)| y.all()).collect::<Vec<Span<'_>>>();
        for (got, want) in device.run(&issues, &outputs).iter().zip(&wants) {
            let got = floats(got);
            let (rows, rest) = got.split_at(want.len());
            assert_bits(&what, rows, want);
            assert!(rest.iter().all(|y| y.to_bits() == u32::MAX), "{what}: rows that the step has not");
        }
        issues[0].entry.name
    }
}

/// Rows of a step and of its bucket.
const ROWS: [(usize, usize); 5] = [(1, 1), (3, 4), (8, 8), (17, 32), (64, 64)];

#[test]
fn integer_products_have_the_bits_of_the_reference() {
    let Some(device) = Device::new() else { return };
    for (i, format) in quant::FORMATS.iter().enumerate() {
        let block = format.dtype.block_len();
        // More units than go in one slab, and not whole groups of eight.
        let cols = if block <= 64 { 69 * block } else { 11 * block };
        for (j, (t, room)) in ROWS.into_iter().enumerate() {
            for digits in [1, 2] {
                let extras = EXTRAS[(i + j + digits) % 4];
                // A matrix whose rows fill no block, next to one that fills several.
                let rows = if extras.residual { vec![11] } else { vec![5, 37] };
                Case { dtype: format.dtype, cols, rows, t, room, digits, extras }.check(&device);
            }
        }
    }
}

#[test]
fn few_units_and_three_parts_have_the_bits_of_the_reference() {
    let Some(device) = Device::new() else { return };
    for dtype in TILED.into_iter().chain([DType::NVFP4]) {
        for (units, t) in [(1, 2), (3, 1), (8, 2), (9, 9)] {
            let (cols, rows) = (units * dtype.block_len(), vec![1, 40, 9]);
            Case { dtype, cols, rows, t, room: t, digits: 1, extras: EXTRAS[2] }.check(&device);
        }
    }
}

/// Formats whose products with several rows are made on tensor cores.
const TILED: [DType; 11] = [
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q8_0,
    DType::IQ4NL,
    DType::MXFP4,
    DType::Q4K,
    DType::Q5K,
    DType::Q6K,
    DType::IQ4XS,
];

#[test]
fn any_rows_of_tiles_have_the_bits_of_the_reference() {
    let Some(device) = Device::new() else { return };
    for (i, dtype) in TILED.into_iter().enumerate() {
        // Two stages and part of a third, and its last group of units not whole.
        let cols = 2 * 2048 + if dtype.block_len() == 32 { 11 * 32 } else { 256 };
        for (j, t) in [2, 7, 9, 16, 17, 33, 70, 129].into_iter().enumerate() {
            let (digits, extras) = (1 + (i + j) % 2, EXTRAS[(i + j / 2) % 4]);
            let rows = if extras.residual { vec![19] } else { vec![16, 3] };
            let kernel = Case { dtype, cols, rows, t, room: t + j % 3, digits, extras }.check(&device);
            let most = if t + j % 3 <= 8 { 1 } else { 4 / digits };
            assert!(kernel.ends_with(&format!("_n{most}_d{digits}")), "{kernel}");
        }
    }
}

/// Rows that are too long to stay in shared memory.
#[test]
fn tiles_that_bring_activations_with_each_stage_have_the_bits_of_the_reference() {
    let Some(device) = Device::new() else { return };
    for (i, dtype) in TILED.into_iter().enumerate() {
        let cols = 8 * 2048 + if dtype.block_len() == 32 { 11 * 32 } else { 256 };
        for (j, (t, room)) in [(3, 3), (12, 16), (8, 17)].into_iter().enumerate() {
            let (digits, extras) = (1 + (i + j) % 2, EXTRAS[(i + j) % 4]);
            let rows = if extras.residual { vec![19] } else { vec![16, 3] };
            Case { dtype, cols, rows, t, room, digits, extras }.check(&device);
        }
    }
}

/// Panels, which a small device takes for small matrices too.
#[test]
fn panels_have_the_bits_of_the_reference() {
    let Some(device) = Device::of(1) else { return };
    for (i, dtype) in TILED.into_iter().enumerate() {
        let small = dtype.block_len() == 32;
        // One unit, one group that is not whole, and some stages a pass with groups that are not whole.
        let columns = if small { [32, 13 * 32, 2 * 2048 + 11 * 32] } else { [256, 5 * 256, 19 * 256] };
        for (j, (t, digits)) in [(17, 2), (33, 1), (64, 1), (70, 2), (129, 1)].into_iter().enumerate() {
            let extras = EXTRAS[(i + j) % 4];
            let rows = if extras.residual { vec![150] } else { vec![16, 3, 129] };
            // Rows that a warp has alone, and a whole panel, by turns.
            let rows = if j % 2 == 0 { rows } else { vec![128] };
            let cols = columns[(i + j) % 3];
            let kernel = Case { dtype, cols, rows, t, room: t + j % 3, digits, extras }.check(&device);
            assert!(kernel.ends_with(&format!("_panel_d{digits}")), "{kernel}");
        }
    }
}

/// More tiles than blocks, some of matrices whose last one is not whole.
#[test]
fn blocks_that_make_several_tiles_have_the_bits_of_the_reference() {
    let Some(device) = Device::new() else { return };
    for (dtype, cols, rows, t) in [
        (DType::Q4K, 512, vec![2 * 132 * 32 + 40, 8, 333], 2),
        (DType::Q6K, 2304, vec![132 * 32 + 50], 9),
        (DType::Q8_0, 96, vec![2000, 2 * 132 * 32 + 1], 3),
        (DType::Q5_0, 2080, vec![132 * 32 + 32, 1], 9),
    ] {
        Case { dtype, cols, rows, t, room: t, digits: 1, extras: EXTRAS[2] }.check(&device);
    }
}

/// On a small device a warp makes several rows of a matrix at a time, and several times.
#[test]
fn float_products_have_the_bits_of_the_reference() {
    for multiprocessors in [132, 1] {
        let Some(device) = Device::of(multiprocessors) else { return };
        for (dtype, sizes) in [
            (DType::F32, vec![7, 1610]),
            (DType::F16, vec![7, 96, 1610]),
            (DType::BF16, vec![7, 256, 1000]),
            (DType::F64, vec![33]),
            (DType::Q4K, vec![512]),
        ] {
            for (i, cols) in sizes.into_iter().enumerate() {
                for (j, (t, room)) in ROWS.into_iter().chain([(2, 2), (9, 9)]).enumerate() {
                    let extras = EXTRAS[(i + j) % 4];
                    let rows = if extras.residual { vec![19] } else { vec![5, 37, 42] };
                    let kernel = Case { dtype, cols, rows, t, room, digits: 0, extras }.check(&device);
                    let streams = kernel.contains(&format!("_x{}_w", room.next_power_of_two()));
                    assert_eq!(streams, room <= 8, "{kernel}");
                }
            }
        }
    }
}

/// More stages of a row than are under way at a time; rows of which eight do not fit into shared memory.
#[test]
fn long_rows_of_floats_have_the_bits_of_the_reference() {
    let Some(device) = Device::of(1) else { return };
    for (dtype, t, cols, kernel) in [
        (DType::BF16, 1, 14_336, "linear_bf16_x1_w"),
        (DType::F16, 8, 6_000, "linear_f16_x8_w"),
        (DType::F32, 2, 20_000, "linear_f32_x2_w"),
        (DType::BF16, 8, 7_300, "linear_bf16_few"),
        (DType::F32, 1, 60_000, "linear_f32_few"),
    ] {
        let rows = vec![33];
        let took = Case { dtype, cols, rows, t, room: t, digits: 0, extras: EXTRAS[3] }.check(&device);
        assert!(took.starts_with(kernel), "{took}");
    }
}

/// Sums of -0, which columns that are not there must leave as they are.
#[test]
fn padding_changes_no_sum() {
    let Some(device) = Device::new() else { return };
    let (cols, rows) = (140, 9);
    for (dtype, t) in
        [DType::F32, DType::BF16].into_iter().flat_map(|dtype| [(dtype, 1), (dtype, 8), (dtype, 16)])
    {
        let weight = Weight { name: "w".into(), dtype, rows, cols, used: WeightUse::Matrix, offset: 0.0 };
        let mut data = vec![0; rows * cols / dtype.block_len() * dtype.block_bytes()];
        let row_bytes = data.len() / rows;
        for row in data.chunks_mut(row_bytes) {
            assert!(quant::encode_row(dtype, &vec![-1e-30; cols], row), "{dtype} can be encoded");
        }
        let matrix = device.matrix(&weight, false, &data);
        let (blob, x) = (device.buffer(&step(t, t)), device.buffer(&bytes(&vec![1e-30; t * cols])));
        let y = device.buffer(&vec![0xFF; 4 * t * rows]);
        let part = Part {
            matrix: &matrix,
            scale: None,
            bias: None,
            x: Input::Floats(x.all()),
            residual: None,
            y: y.all(),
        };
        let issues = linear::issues(blob.all(), Rows::T, t, &[part]).expect("it is planned");
        let got = device.run(&issues, &[y.all()]);
        assert_bits(issues[0].entry.name, &floats(&got[0]), &vec![-0.0; t * rows]);
    }
}

/// One row is normed by the float products that read it; gate and up leave the gated unit.
#[test]
fn one_row_is_normed_by_its_float_products_with_the_bits_of_the_reference() {
    for multiprocessors in [132, 1] {
        let Some(device) = Device::of(multiprocessors) else { return };
        let blob = device.buffer(&step(1, 1));
        let types = [DType::F32, DType::F16, DType::BF16];
        for (i, (dtype, cols)) in
            types.into_iter().flat_map(|ty| [(ty, 7), (ty, 576), (ty, 6_000)]).enumerate()
        {
            let (rows, what) = (37, format!("{dtype} x {cols} on {multiprocessors}"));
            let weight = Weight { name: "w".into(), dtype, rows, cols, used: WeightUse::Matrix, offset: 0.0 };
            let data = stored(dtype, 42, cols);
            let per_row = data.len() / 42;
            let pieces = [&data[..rows * per_row], &data[(42 - rows) * per_row..]];
            let matrices = pieces.map(|piece| device.matrix(&weight, true, piece));
            let mut x = numbers(i as u64, cols, false);
            if i == 4 {
                x[cols / 2] = f32::NAN;
            }
            let (weights, residual) = (numbers(77, cols, false), numbers(78, rows, false));
            let normed = reference::rms_norm(&x, &weights, 1e-5);
            let product = |piece: &[u8], x: &[f32]| -> Vec<f32> {
                let mut decoded = vec![0.0; cols];
                let dot = |data: &[u8]| {
                    quant::decode_row(dtype, data, &mut decoded);
                    reference::dot(&decoded, x)
                };
                piece.chunks(per_row).map(dot).collect()
            };
            let [x_at, weights_at, residual_at] = [&x, &weights, &residual].map(|x| device.buffer(&bytes(x)));
            let y = device.buffer(&vec![0xFF; 4 * rows]);
            let made = Made { x: x_at.all(), norm: Some((weights_at.all(), 1e-5)) };
            for (input, x) in [(Input::Made(made, None), &normed), (Input::Floats(x_at.all()), &x)] {
                let part = |matrix, residual| Part {
                    matrix,
                    scale: None,
                    bias: None,
                    x: input,
                    residual,
                    y: y.all(),
                };
                let [gate, up] = pieces.map(|piece| product(piece, x));
                let alone = [part(&matrices[0], Some(residual_at.all()))];
                let issues = linear::issues(blob.all(), Rows::T, 1, &alone).expect("it is planned");
                let got = device.run(&issues, &[y.all()]);
                let want: Vec<f32> = gate.iter().zip(&residual).map(|(v, r)| r + v).collect();
                assert_bits(&what, &floats(&got[0]), &want);
                for act in [Activation::Silu, Activation::GeluTanh, Activation::GeluErf] {
                    let [gate_part, up_part] = [part(&matrices[0], None), part(&matrices[1], None)];
                    assert!(linear::gates(&gate_part, &up_part, 1), "{what}");
                    let issue = linear::gated(blob.all(), Rows::T, 1, act, [&gate_part, &up_part]);
                    let got = device.run(&[issue.expect("it is planned")], &[y.all()]);
                    let want: Vec<f32> =
                        gate.iter().zip(&up).map(|(&g, u)| reference::activate(act, g) * u).collect();
                    assert_bits(&format!("{what}, {act:?}"), &floats(&got[0]), &want);
                }
            }
        }
    }
}

/// One row is quantized by the product that reads it, after its norm or as it is; gate and up leave the gated unit.
#[test]
fn one_row_is_made_by_its_products_with_the_bits_of_the_reference() {
    // Few enough that warps take several turns.
    let Some(device) = Device::of(1) else { return };
    let blob = device.buffer(&step(1, 1));
    for (i, format) in quant::FORMATS.iter().enumerate() {
        let (dtype, block) = (format.dtype, format.dtype.block_len());
        for (norm, digits) in [(false, 1), (true, 1), (false, 2), (true, 2)] {
            let cols = block * if block <= 64 { 69 } else { 11 };
            let layout = Layout::new(1, cols, block, digits);
            let (rows, what) = (37, format!("{dtype} x {cols}, norm {norm}, {digits} digits"));
            let weight = Weight { name: "w".into(), dtype, rows, cols, used: WeightUse::Matrix, offset: 0.0 };
            let data = stored(dtype, 42, cols);
            let per_row = data.len() / 42;
            // Two matrices with rows in common.
            let pieces = [&data[..rows * per_row], &data[(42 - rows) * per_row..]];
            let matrices = pieces.map(|piece| device.matrix(&weight, true, piece));
            let mut x = numbers(i as u64, cols, false);
            if i % 5 == 4 {
                x[cols / 2] = f32::NAN;
            }
            let (weights, residual) = (numbers(77, cols, false), numbers(78, rows, false));
            let made = if norm { reference::rms_norm(&x, &weights, 1e-5) } else { x.clone() };
            let activations = quantized(&layout, &made);
            let product = |piece: &[u8]| -> Vec<f32> {
                let dot = |data: &[u8]| {
                    let mut row = reference::IntRow::default();
                    row.read(data, format);
                    row.dot(&activations, &layout, 0)
                };
                piece.chunks(per_row).map(dot).collect()
            };
            let [gate, up] = pieces.map(product);
            let [x_at, weights_at, residual_at] = [&x, &weights, &residual].map(|x| device.buffer(&bytes(x)));
            let y = device.buffer(&vec![0xFF; 4 * rows]);
            let source = Made { x: x_at.all(), norm: norm.then(|| (weights_at.all(), 1e-5)) };
            let part = |matrix, residual| Part {
                matrix,
                scale: None,
                bias: None,
                x: Input::Made(source, Some(layout)),
                residual,
                y: y.all(),
            };
            let outputs = [y.all()];
            let alone = [part(&matrices[0], Some(residual_at.all()))];
            let issues = linear::issues(blob.all(), Rows::T, 1, &alone);
            if !linear::streams(&matrices[0], 1, digits) {
                assert!(issues.is_err(), "{what}: nothing makes its activations");
                continue;
            }
            let got = device.run(&issues.expect("it is planned"), &outputs);
            let want: Vec<f32> = gate.iter().zip(&residual).map(|(v, r)| r + v).collect();
            assert_bits(&what, &floats(&got[0]), &want);
            for act in [Activation::Silu, Activation::GeluTanh, Activation::GeluErf] {
                let [gate_part, up_part] = [part(&matrices[0], None), part(&matrices[1], None)];
                assert!(linear::gates(&gate_part, &up_part, 1), "{what}");
                let issue = linear::gated(blob.all(), Rows::T, 1, act, [&gate_part, &up_part]);
                let got = device.run(&[issue.expect("it is planned")], &outputs);
                let want: Vec<f32> =
                    gate.iter().zip(&up).map(|(&g, u)| reference::activate(act, g) * u).collect();
                assert_bits(&format!("{what}, {act:?}"), &floats(&got[0]), &want);
            }
        }
    }
}

/// A matrix whose bytes are not those of its shape is refused before anything is copied, and a product whose activations, bias,
/// residual or result have other sizes than the matrix says before anything is launched: kernels trust rows and columns.
#[test]
fn sizes_that_are_not_those_of_the_shape_are_refused() {
    let Some(device) = Device::new() else { return };
    for (dtype, t) in
        [DType::F32, DType::F16, DType::BF16, DType::Q8_0].into_iter().flat_map(|d| [(d, 1), (d, 2)])
    {
        let (rows, cols) = (5, 96);
        let weight =
            |rows| Weight { name: "w".into(), dtype, rows, cols, used: WeightUse::Matrix, offset: 0.0 };
        let data = stored(dtype, rows, cols);
        let load = |rows: usize, bytes: usize, data: &[u8]| {
            let memory = Buffer::new(&device.context, bytes).expect("there is memory");
            let mut staging = device.staging.borrow_mut();
            Matrix::load(&device.context, &device.stream, &mut staging, memory, &weight(rows), true, data)
        };
        let room = MatrixLayout::new(dtype, rows, cols, true).expect("a shape").bytes();
        let matrix = load(rows, room, &data).expect("it fits");
        for (what, rows, bytes, data) in [
            ("a row more", rows + 1, 4 * room, &data[..]),
            ("a row less", rows - 1, room, &data[..]),
            ("a byte less", rows, room, &data[..data.len() - 1]),
            ("too little memory", rows, room - 1, &data[..]),
            ("no rows", 0, room, &data[..0]),
        ] {
            assert!(load(rows, bytes, data).is_err(), "{dtype}: {what}");
        }
        let blob = device.buffer(&step(t, t));
        let buffer = |values: usize| device.buffer(&bytes(&vec![0.5; values]));
        let run = |x: [usize; 2], bias: usize, residual: usize, y: usize| {
            let layout = (dtype == DType::Q8_0).then(|| Layout::new(x[0], x[1], 32, 1));
            let x = match &layout {
                Some(layout) => device.buffer(&quantized(layout, &vec![0.5; x[0] * x[1]])),
                None => buffer(x[0] * x[1]),
            };
            let [bias, residual, y] = [bias, residual, y].map(buffer);
            let part = Part {
                matrix: &matrix,
                scale: None,
                bias: Some(bias.all()),
                x: layout.map_or(Input::Floats(x.all()), |layout| Input::Quantized(x.all(), layout)),
                residual: Some(residual.all()),
                y: y.all(),
            };
            let issues = linear::issues(blob.all(), Rows::T, t, &[part])?;
            device.run(&issues, &[y.all()]);
            Ok::<(), ingle_cuda::Error>(())
        };
        run([t, cols], rows, t * rows, t * rows).expect("all sizes are right");
        for (what, refused) in [
            ("fewer columns of activations", run([t, cols - 32], rows, t * rows, t * rows)),
            ("bias", run([t, cols], rows - 1, t * rows, t * rows)),
            ("residual", run([t, cols], rows, t * rows - 1, t * rows)),
            ("result", run([t, cols], rows, t * rows, t * rows - 1)),
        ] {
            let said = refused.expect_err(what).to_string();
            assert!(said.contains("[5, 96]"), "{dtype}, {what}: {said}");
        }
    }
}

/// A matrix that passes in pieces, the last one smaller, is the one that passes whole; a row that does not fit is refused.
#[test]
fn pieces_make_the_matrix() {
    let Some(device) = Device::new() else { return };
    for dtype in [DType::F32, DType::BF16, DType::Q5_0, DType::Q6K, DType::IQ4XS] {
        // Rows of all planes are whole chunks: what lies between them is nobody's.
        let (rows, cols) = (7, 2048);
        let weight = Weight { name: "w".into(), dtype, rows, cols, used: WeightUse::Matrix, offset: 0.0 };
        let layout = MatrixLayout::new(dtype, rows, cols, true).expect("a shape");
        let (data, row) = (stored(dtype, rows, cols), layout.row_bytes().iter().sum::<usize>());
        let load = |staging: usize| {
            let memory = device.buffer(&vec![0; layout.bytes()]);
            let mut staging = Staging::new(&device.context, staging).expect("memory");
            let matrix =
                Matrix::load(&device.context, &device.stream, &mut staging, memory, &weight, true, &data)?;
            Ok::<_, ingle_cuda::Error>(device.read(matrix.span()))
        };
        let whole = load(layout.bytes()).expect("it fits");
        assert!(whole.iter().any(|&byte| byte != 0));
        for rows in [1, 3, 6] {
            assert!(load(rows * row + 1).expect("a piece fits") == whole, "{dtype}: pieces of {rows} rows");
        }
        let said = match load(row - 1) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("{dtype}: a row is larger than what it passes through"),
        };
        assert!(said.contains(&format!("at most {} are copied at once", row - 1)), "{said}");
    }
}

/// Sizes that placement counts with are those that are needed.
/// What a row of activations gives with each row of a matrix, by the definition.
fn dots(dtype: DType, data: &[u8], rows: usize, activations: &[u8], layout: &Layout) -> Vec<f32> {
    let format = quant::FORMATS.iter().find(|format| format.dtype == dtype).expect("it is a format");
    let dot = |data: &[u8]| {
        let mut row = reference::IntRow::default();
        row.read(data, format);
        row.dot(activations, layout, 0)
    };
    data.chunks(data.len() / rows).map(dot).collect()
}

#[test]
fn a_third_part_of_another_form_has_the_bits_of_the_reference() {
    for multiprocessors in [1, 132] {
        let Some(device) = Device::of(multiprocessors) else { return };
        let blob = device.buffer(&step(1, 1));
        let pairs = [(DType::Q4K, DType::Q6K), (DType::Q4K, DType::Q6K), (DType::IQ4XS, DType::Q5K)];
        for (units, (first, third)) in [11, 16, 1].into_iter().zip(pairs) {
            let cols = 256 * units;
            let layout = Layout::new(1, cols, 256, 2);
            let x = numbers(units as u64, cols, false);
            let activations = quantized(&layout, &x);
            let x_at = device.buffer(&activations);
            // The third one has its place in memory before the others.
            let rows = [(70, first), (21, third), (37, first)];
            let parts = rows.map(|(rows, dtype)| {
                let weight =
                    Weight { name: "w".into(), dtype, rows, cols, used: WeightUse::Matrix, offset: 0.0 };
                let data = stored(dtype, rows, cols);
                let want = dots(dtype, &data, rows, &activations, &layout);
                (device.matrix(&weight, true, &data), device.buffer(&vec![0xFF; 4 * rows]), want)
            });
            let all = parts.each_ref().map(|(matrix, y, _)| Part {
                matrix,
                scale: None,
                bias: None,
                x: Input::Quantized(x_at.all(), layout),
                residual: None,
                y: y.all(),
            });
            let issues = linear::issues(blob.all(), Rows::T, 1, &all).expect("it is planned");
            assert_eq!(issues.len(), 1, "{first} and {third}: launches");
            let outputs: Vec<Span<'_>> = parts.iter().map(|(_, y, _)| y.all()).collect();
            let got = device.run(&issues, &outputs);
            for (i, (got, (_, _, want))) in got.iter().zip(&parts).enumerate() {
                assert_bits(&format!("{first} and {third}, part {i}"), &floats(got), want);
            }
        }
    }
}

#[test]
fn matrices_take_the_bytes_that_are_planned() {
    let bytes = |dtype, rows, cols| MatrixLayout::new(dtype, rows, cols, true).expect("a shape").bytes();
    assert_eq!(bytes(DType::Q4K, 4096, 4096), 4096 * 16 * 144);
    assert_eq!(bytes(DType::Q6K, 4096, 4096), 4096 * 16 * 210);
    assert_eq!(bytes(DType::Q4_0, 3, 64), 256 + 256);
    assert_eq!(bytes(DType::BF16, 3, 100), 3 * 128 * 2);
    let widened = MatrixLayout::new(DType::Q4_0, 2, 160, false).expect("a shape");
    assert_eq!((widened.bytes(), widened.unit()), (2 * 256 * 4, None));
    for (rows, cols) in [(0, 32), (1, 0), (1, 33), (usize::MAX, 32)] {
        assert!(MatrixLayout::new(DType::Q4_0, rows, cols, true).is_err(), "[{rows}, {cols}]");
    }
}
