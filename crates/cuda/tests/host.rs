//! Bits of the kernels without a GPU: on the stand-in, which runs them as C++ on the host, against the contract's definitions
//! in `ingle_graph`. What the compiler for the device makes of them, only a device can tell.

mod sample;
mod shim;

use half::{bf16, f16};
use ingle_cuda::driver::{Entry, Launch, Param};
use ingle_cuda::kernels::{Source, elementwise, embed, kv, norm};
use ingle_cuda::step::{FROM_HOST, StepLayout};
use ingle_graph::op::RopeStyle;
use ingle_graph::program::KvLayer;
use ingle_graph::{Bucket, Inputs, KvInputs, KvType, PAGE, RopeSpec, math, reference};

use shim::{Host, Value, assert_bits, bytes, floats, launch, numbers};

/// A function of the kernels by name, and its definition.
type Definition = (&'static str, fn(f32) -> f32);

/// All functions of the contract, and the narrow floats, in the order of `functions.cu`.
const FUNCTIONS: &[Definition] = &[
    ("contract_exp", math::exp),
    ("contract_exp2", math::exp2),
    ("contract_ln", math::ln),
    ("contract_log1p", math::log1p),
    ("contract_sigmoid", math::sigmoid),
    ("contract_silu", math::silu),
    ("contract_tanh", math::tanh),
    ("contract_erf", math::erf),
    ("contract_gelu_tanh", math::gelu_tanh),
    ("contract_gelu_erf", math::gelu_erf),
    ("contract_softplus", math::softplus),
    ("through_f16", |x| f16::from_f32(x).to_f32()),
    ("through_bf16", |x| bf16::from_f32(x).to_f32()),
];

const FUNCTION: Entry =
    Entry { name: "functions", params: &[Param::U32, Param::U32, Param::U32, Param::U32, Param::Memory] };
const FUNCTIONS_SOURCE: Source =
    Source { name: "functions", text: include_str!("functions.cu"), entries: &[FUNCTION] };

/// A device for one test.
fn host() -> Option<Host> {
    Host::new("bits of CUDA kernels on the host", &[&FUNCTIONS_SOURCE])
}

/// Rows of the step, and of the bucket it runs in: two are padding.
const T: usize = 3;
const BUCKET: Bucket = Bucket { t: 5, s: 2, r: 4 };

fn inputs() -> Inputs {
    let kv = |cells: &[u32]| KvInputs { cells: cells.to_vec(), tables: vec![1, 2, 3, 0], table_stride: 2 };
    Inputs {
        tokens: vec![3, 0, 6],
        positions: vec![17, 18, 0],
        sequences: vec![0, 0, 1],
        kv: vec![kv(&[1, 2, 3]), kv(&[40, 41, 127])],
        wanted: vec![2, 0],
        ..Inputs::default()
    }
}

fn step(sources: Option<&[u32]>) -> Vec<u8> {
    let layout = StepLayout::new(BUCKET, &[2, 2]).expect("it fits");
    // What is behind the step's rows is rubbish: nothing may read it.
    let mut blob = vec![0xFF; layout.bytes()];
    layout.fill(&inputs(), sources, &mut blob).expect("it fits");
    blob
}

const POISON: f32 = -7777.0;

/// `rows` rows as wanted, and the rest of the bucket as it was.
fn padded(rows: &[f32], cols: usize, bucket: usize) -> Vec<f32> {
    let mut all = rows.to_vec();
    all.resize(bucket * cols, POISON);
    all
}

#[test]
fn contract_functions_have_the_bits_of_the_definition() {
    let Some(host) = &host() else { return };
    // The step is prime to all powers of two, so that every exponent meets every kind of fraction.
    let stride = if cfg!(debug_assertions) { 262_147u64 } else { 8_191 };
    let count = (5..1u64 << 32).step_by(stride as usize).count();
    for (which, (name, function)) in FUNCTIONS.iter().enumerate() {
        let shape = Launch::new([count.div_ceil(256) as u32, 1], 256);
        let [which, first, step, n] = [which as u32, 5, stride as u32, count as u32].map(Value::U32);
        let arguments = [which, first, step, n, Value::Memory(0)];
        let back = launch(host, FUNCTION, shape, &[vec![0; 4 * count]], &arguments);
        let arguments = (5..1u64 << 32).step_by(stride as usize);
        let want: Vec<f32> = arguments.map(|bits| function(f32::from_bits(bits as u32))).collect();
        assert_bits(name, &floats(&back[0]), &want);
    }
}

#[test]
fn elementwise_kernels_have_the_bits_of_the_reference() {
    let Some(host) = &host() else { return };
    let cols = 300;
    let (a, b) = (numbers(1, T * cols, true), numbers(2, T * cols, false));
    let room = bytes(&padded(&[], cols, BUCKET.t));
    let memory =
        [step(None), bytes(&padded(&a, cols, BUCKET.t)), bytes(&padded(&b, cols, BUCKET.t)), room.clone()];
    let shape = elementwise::shape(BUCKET.t as u32, cols as u32);
    let [rows, columns] = [0, cols as u32].map(Value::U32);
    let [s, x, y, out] = [0, 1, 2, 3].map(Value::Memory);
    let pairs = |f: &dyn Fn(f32, f32) -> f32| a.iter().zip(&b).map(|(&a, &b)| f(a, b)).collect::<Vec<_>>();
    let back = launch(host, elementwise::ADD, shape, &memory, &[s, rows, columns, x, y, out]);
    assert_bits("add_rows", &floats(&back[3]), &padded(&pairs(&|a, b| a + b), cols, BUCKET.t));
    let one = [
        (elementwise::SCALE, 0.3, pairs(&|a, _| a * 0.3)),
        (elementwise::SOFTCAP, 30.0, pairs(&|a, _| 30.0 * math::tanh(a / 30.0))),
    ];
    for (entry, number, want) in one {
        let back = launch(host, entry, shape, &memory, &[s, rows, columns, x, Value::F32(number), out]);
        assert_bits(entry.name, &floats(&back[3]), &padded(&want, cols, BUCKET.t));
        // In place.
        let back = launch(host, entry, shape, &memory, &[s, rows, columns, x, Value::F32(number), x]);
        assert_bits(entry.name, &floats(&back[1]), &padded(&want, cols, BUCKET.t));
    }
    let shape = elementwise::shape(BUCKET.r as u32, cols as u32);
    let back = launch(host, elementwise::TAKE_ROWS, shape, &memory, &[s, columns, x, out]);
    let want: Vec<f32> = [2, 0].iter().flat_map(|row| &a[row * cols..(row + 1) * cols]).copied().collect();
    assert_bits("take_rows", &floats(&back[3])[..BUCKET.r * cols], &padded(&want, cols, BUCKET.r));
}

#[test]
fn embedding_takes_the_hosts_tokens_or_those_sampled() {
    let Some(host) = &host() else { return };
    let (vocabulary, cols) = (7, 130);
    let table = numbers(3, vocabulary * cols, true);
    let halves = |f: &dyn Fn(f32) -> u16| table.iter().flat_map(|&x| f(x).to_ne_bytes()).collect::<Vec<u8>>();
    let tables: [(Entry, Vec<u8>, Vec<f32>); 3] = [
        (embed::EMBED_F32, bytes(&table), table.clone()),
        (
            embed::EMBED_F16,
            halves(&|x| f16::from_f32(x).to_bits()),
            table.iter().map(|&x| f16::from_f32(x).to_f32()).collect(),
        ),
        (
            embed::EMBED_BF16,
            halves(&|x| bf16::from_f32(x).to_bits()),
            table.iter().map(|&x| bf16::from_f32(x).to_f32()).collect(),
        ),
    ];
    // The second row takes the token that was sampled second; the last sampled one is outside the table.
    let sampled: Vec<u8> = [1u32, 5, 99].iter().flat_map(|token| token.to_ne_bytes()).collect();
    for (entry, table, wide) in tables {
        for (sources, tokens) in
            [(None, [Some(3), Some(0), Some(6)]), (Some([FROM_HOST, 1, 2]), [Some(3), Some(5), None])]
        {
            let blob = step(sources.as_ref().map(|sources| &sources[..]));
            let memory = [blob, sampled.clone(), table.clone(), bytes(&padded(&[], cols, BUCKET.t))];
            let [s, drawn, rows, out] = [0, 1, 2, 3].map(Value::Memory);
            let [v, c] = [vocabulary as u32, cols as u32].map(Value::U32);
            let shape = embed::shape(BUCKET.t as u32, cols as u32);
            let back = launch(host, entry, shape, &memory, &[s, drawn, rows, v, c, Value::F32(1.5), out]);
            let row = |token: Option<usize>| match token {
                Some(token) => wide[token * cols..(token + 1) * cols].iter().map(|x| x * 1.5).collect(),
                None => vec![f32::NAN; cols],
            };
            let want: Vec<f32> = tokens.into_iter().flat_map(row).collect();
            assert_bits(entry.name, &floats(&back[3]), &padded(&want, cols, BUCKET.t));
        }
    }
}

#[test]
fn norms_and_peaks_have_the_bits_of_the_reference() {
    let Some(host) = &host() else { return };
    for (group, groups) in [(1000, 1), (64, 3), (96, 2), (256, 1), (7, 2)] {
        let cols = group * groups;
        let (x, weight) = (numbers(4, T * cols, false), numbers(5, group, false));
        let room = bytes(&padded(&[], cols, BUCKET.t));
        let memory = [step(None), bytes(&padded(&x, cols, BUCKET.t)), bytes(&weight), room];
        let [s, input, w, out] = [0, 1, 2, 3].map(Value::Memory);
        let [rows, g] = [0, group as u32].map(Value::U32);
        let shape = norm::norm_shape(BUCKET.t as u32, groups as u32, group as u32);
        let back =
            launch(host, norm::RMS_NORM, shape, &memory, &[s, rows, g, Value::F32(1e-6), input, w, out]);
        let want: Vec<f32> = x.chunks(group).flat_map(|x| reference::rms_norm(x, &weight, 1e-6)).collect();
        assert_bits(&format!("rms_norm of {group}"), &floats(&back[3]), &padded(&want, cols, BUCKET.t));
    }
    let (cols, span) = (700usize, 256usize);
    let mut x = numbers(6, T * cols, false);
    x[cols + 300] = f32::NAN;
    x[2 * cols..2 * cols + span].fill(-0.0);
    let spans = cols.div_ceil(span);
    let memory = [step(None), bytes(&padded(&x, cols, BUCKET.t)), bytes(&padded(&[], spans, BUCKET.t))];
    let [s, input, out] = [0, 1, 2].map(Value::Memory);
    let [rows, c, n] = [0, cols as u32, span as u32].map(Value::U32);
    let shape = norm::peaks_shape(BUCKET.t as u32, cols as u32, span as u32);
    let back = launch(host, norm::PEAKS, shape, &memory, &[s, rows, c, n, input, out]);
    let peak = |x: &[f32]| x.iter().copied().fold(f32::NEG_INFINITY, reference::max) + 0.0;
    let want: Vec<f32> = x.chunks(cols).flat_map(|row| row.chunks(span).map(peak)).collect();
    assert_bits("peaks", &floats(&back[2]), &padded(&want, spans, BUCKET.t));
}

fn rope_spec(style: RopeStyle, pairs: usize) -> RopeSpec {
    let inv_freq = (0..pairs).map(|i| 10000f32.powf(-(i as f32) / pairs as f32)).collect();
    RopeSpec { style, inv_freq, scale: 1.1 }
}

fn rotated(spec: &RopeSpec, x: &[f32], cols: usize, head_dim: usize) -> Vec<f32> {
    let mut x = x.to_vec();
    for (row, x) in x.chunks_mut(cols).enumerate() {
        x.chunks_mut(head_dim).for_each(|head| reference::rope(spec, inputs().positions[row], head));
    }
    x
}

/// What a pool holds after the step: everything as it was but for the step's cells of group 1.
fn stored(kind: KvType, layer: &KvLayer, pool: &[u8], x: &[f32], saturated: &mut u64) -> Vec<u8> {
    let (mut pool, dim) = (pool.to_vec(), layer.head_dim);
    for (row, &cell) in inputs().kv[1].cells.iter().enumerate() {
        let (page, slot) = (cell as usize / PAGE, cell as usize % PAGE);
        for head in 0..layer.heads {
            let mut x = x[(row * layer.heads + head) * dim..][..dim].to_vec();
            let block = &mut pool[page * kv::page_bytes(layer, kind) + head * kv::head_bytes(kind, dim)..];
            if kind == KvType::Q8_0 {
                for (u, unit) in x.chunks(32).enumerate() {
                    let (d, q) = reference::kv_q8_0(unit);
                    let digits = q[..unit.len()].iter().map(|&q| q as u8);
                    block[slot * dim + 32 * u..].iter_mut().zip(digits).for_each(|(to, q)| *to = q);
                    let at = PAGE * dim + 2 * (slot * dim.div_ceil(32) + u);
                    let d = if d.is_nan() { 0x7E00 } else { d.to_bits() };
                    block[at..at + 2].copy_from_slice(&d.to_ne_bytes());
                }
                continue;
            }
            reference::kv_round(kind, &mut x, saturated);
            for (d, x) in x.into_iter().enumerate() {
                let (at, n) = (kind.bytes(slot * dim + d), kind.bytes(1));
                let bytes = match kind {
                    KvType::F16 => f16::from_f32(x).to_bits().to_ne_bytes().to_vec(),
                    KvType::BF16 => bf16::from_f32(x).to_bits().to_ne_bytes().to_vec(),
                    _ => x.to_ne_bytes().to_vec(),
                };
                block[at..at + n].copy_from_slice(&bytes);
            }
        }
    }
    pool
}

/// NaN as one NaN, so that pools can be compared as bytes.
fn canonical(kind: KvType, pool: &[u8]) -> Vec<u8> {
    let half = |bits: u16, exponent: u16, nan: u16| match bits & exponent == exponent
        && bits & !exponent & 0x7FFF != 0
    {
        true => nan,
        false => bits,
    };
    let halves = |f: &dyn Fn(u16) -> u16| {
        pool.chunks_exact(2).flat_map(|b| f(u16::from_ne_bytes([b[0], b[1]])).to_ne_bytes()).collect()
    };
    match kind {
        KvType::F32 => {
            bytes(&floats(pool).iter().map(|x| if x.is_nan() { f32::NAN } else { *x }).collect::<Vec<_>>())
        }
        KvType::F16 => halves(&|b| half(b, 0x7C00, 0x7E00)),
        KvType::BF16 => halves(&|b| half(b, 0x7F80, 0x7FC0)),
        KvType::Q8_0 => pool.to_vec(),
    }
}

#[test]
fn rope_and_stores_have_the_bits_of_the_reference() {
    let Some(host) = &host() else { return };
    for (style, pairs, head_dim, kind) in [
        (RopeStyle::Half, 32, 64, KvType::F16),
        (RopeStyle::Interleaved, 32, 64, KvType::Q8_0),
        (RopeStyle::Half, 16, 80, KvType::Q8_0),
        (RopeStyle::Interleaved, 20, 48, KvType::BF16),
        (RopeStyle::Half, 160, 320, KvType::F32),
    ] {
        let layer = KvLayer { heads: 2, head_dim, group: 1 };
        let (heads, kv_heads) = (3, layer.heads);
        let spec = rope_spec(style, pairs);
        let what = format!("{style:?}, {pairs} pairs of {head_dim}, {kind}");
        let (q_cols, cols) = (heads * head_dim, kv_heads * head_dim);
        let q = numbers(7, T * q_cols, true);
        let (k, v) = (numbers(8, T * cols, true), numbers(9, T * cols, true));
        let pool = vec![0xA5; 4 * kv::page_bytes(&layer, kind)];
        let memory = [
            step(None),
            bytes(&kv::rope_table(&spec, 20)),
            bytes(&padded(&q, q_cols, BUCKET.t)),
            bytes(&padded(&k, cols, BUCKET.t)),
            bytes(&padded(&v, cols, BUCKET.t)),
            pool.clone(),
            pool.clone(),
            vec![0; 8],
        ];
        let [s, table, q_in, k_in, v_in, keys, values, count] = [0, 1, 2, 3, 4, 5, 6, 7].map(Value::Memory);
        let style = Value::U32(if style == RopeStyle::Half { 0 } else { 1 });
        let [group, cells, n, n_kv, dim, p] =
            [1, 4 * PAGE as u32, heads as u32, kv_heads as u32, head_dim as u32, pairs as u32]
                .map(Value::U32);
        let q_want = padded(&rotated(&spec, &q, q_cols, head_dim), q_cols, BUCKET.t);

        // In place, as the memory plan has it.
        let shape = kv::rope_shape(BUCKET.t as u32, heads as u32, head_dim as u32);
        let back = launch(host, kv::ROPE, shape, &memory, &[s, dim, p, style, table, q_in, q_in]);
        assert_bits(&format!("rope: {what}"), &floats(&back[2]), &q_want);

        let check = |name: &str, back: &[Vec<u8>], k: &[f32]| {
            let mut saturated = 0;
            let k_want = stored(kind, &layer, &pool, k, &mut saturated);
            let v_want = stored(kind, &layer, &pool, &v, &mut saturated);
            for (x, got, want) in [("keys", &back[5], k_want), ("values", &back[6], v_want)] {
                let (got, want) = (canonical(kind, got), canonical(kind, &want));
                let at = got.iter().zip(&want).position(|(a, b)| a != b);
                assert_eq!(at, None, "{name}: {what}: first byte of {x} that differs");
                assert_ne!(want, pool, "{name}: nothing was to be stored");
            }
            assert_eq!(
                u64::from_ne_bytes(back[7][..].try_into().expect("8 bytes")),
                saturated,
                "{name}: {what}"
            );
            assert!(saturated > 0 || matches!(kind, KvType::F32 | KvType::Q8_0), "{name}: edges saturate");
        };
        let shape = kv::store_shape(BUCKET.t as u32, &layer);
        let arguments = [s, group, cells, dim, k_in, v_in, keys, values, count];
        check("kv_store", &launch(host, kv::store_kernel(kind), shape, &memory, &arguments), &k);

        let shape = kv::rope_store_shape(BUCKET.t as u32, heads as u32, &layer);
        for norms in [[false, false], [true, false], [false, true], [true, true]] {
            let [weights, eps] = [numbers(10, head_dim, false), vec![1e-5, 1e-3]];
            let mut memory = memory.to_vec();
            memory.push(bytes(&weights));
            let norm = |at: usize| if norms[at] { Value::Memory(8) } else { Value::Nothing };
            let normed = |at: usize, x: &[f32]| -> Vec<f32> {
                let norm = |x| reference::rms_norm(x, &weights, eps[at]);
                if norms[at] { x.chunks(head_dim).flat_map(norm).collect() } else { x.to_vec() }
            };
            let arguments = [
                [s, group, cells, n, n_kv, dim, p, style, table, q_in, k_in, v_in],
                [
                    norm(0),
                    Value::F32(eps[0]),
                    norm(1),
                    Value::F32(eps[1]),
                    q_in,
                    keys,
                    values,
                    count,
                    s,
                    s,
                    s,
                    s,
                ],
            ];
            let arguments = &arguments.as_flattened()[..20];
            let back = launch(host, kv::rope_store_kernel(kind), shape, &memory, arguments);
            let q_want = padded(&rotated(&spec, &normed(0, &q), q_cols, head_dim), q_cols, BUCKET.t);
            assert_bits(&format!("rope_store: {what}, norms {norms:?}"), &floats(&back[2]), &q_want);
            check("rope_store", &back, &rotated(&spec, &normed(1, &k), cols, head_dim));
        }

        // Cells outside the pool are left alone: the last row's is beyond 100.
        let few = [s, group, Value::U32(100), dim, k_in, v_in, keys, values, count];
        let back =
            launch(host, kv::store_kernel(kind), kv::store_shape(BUCKET.t as u32, &layer), &memory, &few);
        let page = kv::page_bytes(&layer, kind);
        assert_eq!(back[5][3 * page..], pool[3 * page..], "{what}: a cell outside the pool");
    }
}
