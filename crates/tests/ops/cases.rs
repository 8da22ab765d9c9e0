//! The table.

use std::fmt;

use ingle_graph::op::RopeStyle;
use ingle_graph::{Activation, Activations, KvType};
use ingle_tensor::{DType, quant};

/// One row of the table. `rows` is the number of token rows of the step under test.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Case {
    /// A product with a weight `[n, k]`; with `scaled`, the file has a scale for it.
    Linear {
        rows: usize,
        dtype: DType,
        n: usize,
        k: usize,
        scaled: bool,
        bias: bool,
        residual: bool,
        activations: Activations,
    },
    Embed {
        rows: usize,
        dtype: DType,
        cols: usize,
        scale: f32,
    },
    /// With `feeds`, the result also feeds a product of this format, so it is quantized on the way out.
    Norm {
        rows: usize,
        cols: usize,
        group: usize,
        feeds: Option<DType>,
    },
    Glu {
        rows: usize,
        cols: usize,
        act: Activation,
        feeds: Option<DType>,
    },
    /// A gated unit over products with two weights `[n, k]`, which is the tail of both.
    Gated {
        rows: usize,
        dtype: DType,
        n: usize,
        k: usize,
        act: Activation,
        feeds: Option<DType>,
    },
    Add {
        rows: usize,
        cols: usize,
    },
    Scale {
        rows: usize,
        cols: usize,
    },
    Softcap {
        rows: usize,
        cols: usize,
    },
    Peaks {
        rows: usize,
        cols: usize,
        span: usize,
    },
    Rope {
        rows: usize,
        heads: usize,
        head_dim: usize,
        pairs: usize,
        style: RopeStyle,
    },
    TakeRows {
        rows: usize,
        cols: usize,
    },
    /// `past` positions are stored by earlier steps; then `rows` rows attend, as one sequence or as `rows` of them.
    Attention {
        rows: usize,
        past: usize,
        apart: bool,
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
        kv: KvType,
        window: Option<usize>,
        softcap: Option<f32>,
        /// Input table (`q`, `k` or `v`) with rows that are not finite, huge, tiny or zero.
        wild: Option<&'static str>,
    },
}

impl Case {
    /// Token rows of the step under test.
    pub fn rows(&self) -> usize {
        match *self {
            Case::Linear { rows, .. }
            | Case::Embed { rows, .. }
            | Case::Norm { rows, .. }
            | Case::Glu { rows, .. }
            | Case::Gated { rows, .. }
            | Case::Add { rows, .. }
            | Case::Scale { rows, .. }
            | Case::Softcap { rows, .. }
            | Case::Peaks { rows, .. }
            | Case::Rope { rows, .. }
            | Case::TakeRows { rows, .. }
            | Case::Attention { rows, .. } => rows,
        }
    }
}

impl Case {
    /// What the bits table counts together: the op and its format.
    pub fn group(&self) -> String {
        match self {
            Case::Linear { dtype, scaled: true, .. } => format!("linear {dtype}, scaled"),
            Case::Linear { dtype, activations, .. } if dtype.is_quantized() => {
                format!("linear {dtype} x {activations}")
            }
            Case::Linear { dtype, .. } => format!("linear {dtype} x f32"),
            Case::Embed { dtype, .. } => format!("embed {dtype}"),
            Case::Norm { feeds: None, .. } => "norm".into(),
            Case::Norm { .. } => "norm + quantize".into(),
            Case::Glu { feeds: None, .. } => "glu".into(),
            Case::Glu { .. } => "glu + quantize".into(),
            Case::Gated { feeds: None, .. } => "gate, up, glu".into(),
            Case::Gated { .. } => "gate, up, glu + quantize".into(),
            Case::Add { .. } => "add".into(),
            Case::Scale { .. } => "scale".into(),
            Case::Softcap { .. } => "softcap".into(),
            Case::Peaks { .. } => "peaks".into(),
            Case::Rope { .. } => "rope".into(),
            Case::TakeRows { .. } => "take rows".into(),
            Case::Attention { kv, .. } => format!("rope, store, attention {kv}"),
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Rows every op is run with.
const ROWS: [usize; 4] = [1, 2, 7, 64];

/// All cases.
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let plain: Vec<DType> = DType::all().filter(|dtype| !dtype.is_quantized()).collect();
    let formats: Vec<DType> = quant::FORMATS.iter().map(|f| f.dtype).collect();
    for rows in ROWS {
        for &dtype in &plain {
            for (n, k) in [(1, 1), (3, 31), (17, 33), (40, 96), (5, 300)] {
                let activations = Activations::Int8;
                let (bias, residual) = (k == 96, n == 17);
                cases.push(Case::Linear { rows, dtype, n, k, scaled: false, bias, residual, activations });
            }
            cases.push(Case::Embed { rows, dtype, cols: 33, scale: 1.0 });
        }
        for dtype in [DType::F16, DType::I8, DType::Q8_0, DType::NVFP4] {
            for (bias, residual) in [(false, false), (true, false), (false, true), (true, true)] {
                let (n, k, activations) = (35, 192, Activations::Int8);
                cases.push(Case::Linear { rows, dtype, n, k, scaled: true, bias, residual, activations });
            }
        }
        for &dtype in &formats {
            let unit = dtype.block_len();
            for (n, units) in [(1, 1usize), (15, 2), (16, 7), (17, 8), (33, 9), (64, 18)] {
                let k = unit * if unit == 256 { units.div_ceil(2) } else { units };
                for activations in [Activations::Int8, Activations::Int16, Activations::F32] {
                    if activations != Activations::Int8 && n != 17 {
                        continue;
                    }
                    let (bias, residual) = (n == 33, n == 64);
                    cases.push(Case::Linear {
                        rows,
                        dtype,
                        n,
                        k,
                        scaled: false,
                        bias,
                        residual,
                        activations,
                    });
                }
            }
            cases.push(Case::Embed { rows, dtype, cols: unit, scale: 3.7 });
        }
        for (cols, group) in [(5, 5), (64, 64), (300, 300), (96, 32), (576, 576), (1024, 256), (2064, 2064)] {
            cases.push(Case::Norm { rows, cols, group, feeds: None });
        }
        for feeds in [DType::Q8_0, DType::NVFP4, DType::Q1_0, DType::Q4K] {
            cases.push(Case::Norm { rows, cols: 512, group: 512, feeds: Some(feeds) });
            cases.push(Case::Glu { rows, cols: 768, act: Activation::Silu, feeds: Some(feeds) });
        }
        for act in [Activation::Silu, Activation::GeluTanh, Activation::GeluErf] {
            cases.push(Case::Glu { rows, cols: 67, act, feeds: None });
            cases.push(Case::Gated { rows, dtype: DType::Q4_1, n: 75, k: 96, act, feeds: None });
        }
        for (dtype, feeds) in [
            (DType::Q4_1, DType::Q4_1),
            (DType::Q5_0, DType::Q4K),
            (DType::Q6K, DType::Q8_0),
            (DType::NVFP4, DType::NVFP4),
            (DType::F32, DType::Q1_0),
            (DType::BF16, DType::Q6K),
        ] {
            let (n, k, act) = (768, 256, Activation::GeluTanh);
            cases.push(Case::Gated { rows, dtype, n, k, act, feeds: Some(feeds) });
        }
        for cols in [1, 67, 640] {
            cases.push(Case::Add { rows, cols });
            cases.push(Case::Scale { rows, cols });
            cases.push(Case::Softcap { rows, cols });
            cases.push(Case::TakeRows { rows, cols });
        }
        for (cols, span) in [(1, 1), (67, 64), (300, 1024), (2048, 256), (2500, 1000)] {
            cases.push(Case::Peaks { rows, cols, span });
        }
        for style in [RopeStyle::Half, RopeStyle::Interleaved] {
            for (heads, head_dim, pairs) in [(1, 2, 1), (3, 64, 32), (2, 96, 24), (4, 256, 128)] {
                cases.push(Case::Rope { rows, heads, head_dim, pairs, style });
            }
        }
        for (past, head_dim, heads, kv_heads) in [
            (0, 64, 3, 1),
            (5, 64, 9, 3),
            (255, 32, 4, 2),
            (300, 256, 4, 1),
            (515, 128, 2, 2),
            (40, 80, 6, 2),
        ] {
            for kv in [KvType::F16, KvType::F32, KvType::BF16, KvType::Q8_0] {
                for (window, softcap) in [(None, None), (Some(37), None), (None, Some(30.0))] {
                    let rare = window.is_some() || softcap.is_some();
                    if (kv != KvType::F16 && (rare || past > 300))
                        || (rare && rows == 2)
                        || (past > 300 && rows == 64)
                    {
                        continue;
                    }
                    let apart = rows == 7;
                    cases.push(Case::Attention {
                        rows,
                        past,
                        apart,
                        heads,
                        kv_heads,
                        head_dim,
                        kv,
                        window,
                        softcap,
                        wild: None,
                    });
                }
            }
        }
    }
    blocks_of_attention(&mut cases);
    cases
}

/// Where blocks of queries, tiles, pages, chunks and windows begin and end in all ways that meet.
fn blocks_of_attention(cases: &mut Vec<Case>) {
    let shapes = [(9, 3, 64), (4, 1, 256), (8, 2, 128), (5, 5, 32), (6, 2, 80), (10, 2, 64), (8, 1, 64)];
    let kinds = [KvType::F16, KvType::F16, KvType::F32, KvType::Q8_0, KvType::BF16];
    let windows = [None, Some(1), None, Some(32), None, Some(33), None, Some(200)];
    for (n, rows) in (1..=8).chain([11, 16, 17, 21, 22, 31, 32, 33, 40, 64]).enumerate() {
        let past = [254, 224, 255, 256, 95, 257, 256 - rows][(3 * n + n / 7) % 7];
        let (heads, kv_heads, head_dim) = shapes[n % shapes.len()];
        let (kv, window) = (kinds[n % kinds.len()], windows[n % windows.len()]);
        let softcap = (n % 9 == 4).then_some(30.0);
        let wild = None;
        cases.push(Case::Attention {
            rows,
            past,
            apart: false,
            heads,
            kv_heads,
            head_dim,
            kv,
            window,
            softcap,
            wild,
        });
    }
    for wild in ["q", "k", "v"] {
        for (rows, past) in [(1, 40), (2, 260), (7, 100), (33, 250)] {
            let (window, softcap) = ((past == 250).then_some(9), (past == 100).then_some(30.0));
            let (apart, wild) = (rows == 7, Some(wild));
            let kv = if past == 40 { KvType::F32 } else { KvType::F16 };
            let (heads, kv_heads, head_dim) = (9, 3, 64);
            cases.push(Case::Attention {
                rows,
                past,
                apart,
                heads,
                kv_heads,
                head_dim,
                kv,
                window,
                softcap,
                wild,
            });
        }
    }
}
