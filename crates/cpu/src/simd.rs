//! Instruction sets, and vectors of f32 whose width is a type.
//!
//! A kernel is written once, as a [`Kernel`] over a [`Vector`] type, and [`Isa::run`] compiles it for each instruction
//! set. Because every lane operation is an IEEE operation, the instruction set cannot change a bit; only the order in
//! which a kernel combines lanes could, and that order is the contract's.

use std::fmt;
use std::sync::OnceLock;

use ingle_graph::math::Lanes;
use ingle_graph::{FloatArithmetic, Graph, Node, Numerics, Op};

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;

/// Queries that share a key-value head from which `amx3` is the faster arithmetic for prompts and generated tokens
/// together: with fewer, splitting keys and values costs a generated token more than a prompt gains
/// (docs/performance.md).
const AMX3_QUERIES: usize = 4;

/// An instruction set a kernel can be run with, from the plainest to the widest.
#[derive(Clone, Copy, PartialEq, Eq, Debug, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// No vectors; the only one on processors without AVX2 and FMA, where a fused multiply-add is a slow call.
    Scalar,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ, VL and VNNI.
    Avx512,
    /// The same with BF16, and matrix tiles with int8 and bf16 products.
    Amx,
}

impl Isa {
    /// Every instruction set, plainest first.
    pub const ALL: [Isa; 4] = [Isa::Scalar, Isa::Avx2, Isa::Avx512, Isa::Amx];

    /// The widest one this processor, and this build, have.
    pub fn detect() -> Isa {
        static WIDEST: OnceLock<Isa> = OnceLock::new();
        *WIDEST.get_or_init(|| {
            #[cfg(target_arch = "x86_64")]
            {
                let avx2 = is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c");
                let avx512 = is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni");
                if avx2 && avx512 {
                    return if amx::available() { Isa::Amx } else { Isa::Avx512 };
                }
                if avx2 {
                    return Isa::Avx2;
                }
            }
            Isa::Scalar
        })
    }

    /// Whether this processor, and this build, have it: each includes those before it.
    #[inline]
    pub fn available(self) -> bool {
        self <= Self::detect()
    }

    /// The float arithmetic that a mode stands for with this instruction set for this model: [`Isa::float`], unless fewer
    /// queries share a key-value head than pay for `amx3`.
    pub fn float_for(self, numerics: Numerics, graph: &Graph) -> FloatArithmetic {
        let shared = |node: &Node| match &node.op {
            Op::Attention { spec, .. } => Some(spec.heads / spec.kv_heads),
            _ => None,
        };
        match graph.nodes.iter().filter_map(shared).min() {
            Some(queries) if queries < AMX3_QUERIES => FloatArithmetic::F32x32,
            _ => self.float(numerics),
        }
    }

    /// The float arithmetic of a mode that this instruction set has kernels for.
    pub fn float(self, numerics: Numerics) -> FloatArithmetic {
        match numerics {
            Numerics::Fast if self >= Isa::Amx => FloatArithmetic::Amx3,
            Numerics::Fast | Numerics::Exact => FloatArithmetic::F32x32,
        }
    }

    /// Name for people and path counters.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Amx => "amx",
        }
    }

    /// Runs a kernel compiled for this instruction set.
    ///
    /// # Panics
    /// When the processor lacks the instruction set: a caller asks [`Isa::available`] once, where it takes the option.
    #[inline]
    pub fn run<K: Kernel>(self, kernel: K) {
        match self {
            Isa::Scalar => kernel.run::<f32>(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                assert!(self.available());
                // SAFETY: the processor has what the function is compiled for.
                unsafe { run_avx2(kernel) }
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Amx => {
                assert!(self.available());
                // SAFETY: as above.
                unsafe { run_avx512(kernel) }
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => unreachable!("{self} is not available on this processor"),
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn run_avx2<K: Kernel>(kernel: K) {
    kernel.run::<avx2::F32x8>();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn run_avx512<K: Kernel>(kernel: K) {
    kernel.run::<avx512::F32x16>();
}

/// A computation with its arguments, written for any vector type.
///
/// `run`, and every function it calls with vectors, must be `#[inline(always)]`: only what ends up inside the function
/// compiled for an instruction set is compiled with it.
pub trait Kernel {
    /// The computation.
    fn run<V: Vector>(self);
}

/// Hints about the cache line at an address, which need not be readable.
macro_rules! hints {
    ($($(#[$doc:meta])* $name:ident: $hint:ident;)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        pub fn $name(at: *const u8) {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a hint: it reads nothing the program can see and cannot fault.
            unsafe {
                std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::$hint }>(at.cast());
            }
            #[cfg(not(target_arch = "x86_64"))]
            let _ = at;
        }
    )*};
}

hints! {
    /// Asks for a line before it is needed.
    prefetch: _MM_HINT_T0;
    /// The same, but no further than the second cache, which can have more requests under way than the first.
    prefetch_far: _MM_HINT_T1;
    /// The same for a line that will be written: other caches give it up.
    prefetch_write: _MM_HINT_ET0;
}

/// Most lanes a [`Vector`] has; every width divides it.
pub const MAX_LANES: usize = 16;

/// A vector of [`Vector::LANES`] f32: arithmetic from [`Lanes`], here memory and what combines lanes.
///
/// Pointers need no alignment. Every method that takes one wants it valid for the lanes it names.
pub trait Vector: Lanes {
    /// Lanes: 1, 8 or 16.
    const LANES: usize;

    /// `LANES` f32.
    ///
    /// # Safety
    /// `from` is readable for `LANES` f32.
    unsafe fn load(from: *const f32) -> Self;
    /// Writes `LANES` f32.
    ///
    /// # Safety
    /// `to` is writable for `LANES` f32.
    unsafe fn store(self, to: *mut f32);
    /// The first `n` < `LANES` lanes from memory, the others +0.
    ///
    /// # Safety
    /// `from` is readable for `n` f32.
    unsafe fn load_first(from: *const f32, n: usize) -> Self;
    /// Writes the first `n` < `LANES` lanes.
    ///
    /// # Safety
    /// `to` is writable for `n` f32.
    unsafe fn store_first(self, to: *mut f32, n: usize);
    /// Elements at even and at odd places of `2 * LANES` f32.
    ///
    /// # Safety
    /// `from` is readable for `2 * LANES` f32.
    unsafe fn load_pairs(from: *const f32) -> (Self, Self);
    /// The inverse of [`Vector::load_pairs`].
    ///
    /// # Safety
    /// `to` is writable for `2 * LANES` f32.
    unsafe fn store_pairs(even: Self, odd: Self, to: *mut f32);
    /// `LANES` f16, widened.
    ///
    /// # Safety
    /// `from` is readable for `2 * LANES` bytes.
    unsafe fn load_f16(from: *const u8) -> Self;
    /// `LANES` bfloat16, widened.
    ///
    /// # Safety
    /// `from` is readable for `2 * LANES` bytes.
    unsafe fn load_bf16(from: *const u8) -> Self;
    /// `LANES` signed bytes, converted.
    ///
    /// # Safety
    /// `from` is readable for `LANES` bytes.
    unsafe fn load_i8(from: *const u8) -> Self;
    /// Rounds to f16, to nearest even.
    ///
    /// # Safety
    /// `to` is writable for `2 * LANES` bytes.
    unsafe fn store_f16(self, to: *mut u8);
    /// Rounds to bfloat16, to nearest even.
    ///
    /// # Safety
    /// `to` is writable for `2 * LANES` bytes.
    unsafe fn store_bf16(self, to: *mut u8);
    /// Integral values within -128..=127 as signed bytes.
    ///
    /// # Safety
    /// `to` is writable for `LANES` bytes.
    unsafe fn store_i8(self, to: *mut u8);

    /// Transposes a matrix of `LANES` by `LANES`.
    ///
    /// # Safety
    /// `matrix` is valid for `LANES * LANES` f32, which are overwritten.
    unsafe fn transpose(matrix: *mut f32);

    /// 0, 1, 2, ...
    fn ramp() -> Self;
    /// The larger of two numbers; unspecified when one is NaN, and which zero when both are.
    fn max(self, other: Self) -> Self;
    /// The largest integer not above.
    fn floor(self) -> Self;
    /// self <= other; false when either is NaN.
    fn le(self, other: Self) -> Self::Mask;
    /// Lanes set in both.
    fn both(a: Self::Mask, b: Self::Mask) -> Self::Mask;
    /// How many lanes are set.
    fn count(mask: Self::Mask) -> usize;
    /// Sum of all lanes: the upper half added to the lower half until one is left.
    fn sum(self) -> f32;
    /// Largest lane; unspecified when one is NaN.
    fn largest(self) -> f32;
}

impl Vector for f32 {
    const LANES: usize = 1;

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller's.
        unsafe { from.read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller's.
        unsafe { to.write_unaligned(self) }
    }
    #[inline(always)]
    unsafe fn load_first(_: *const f32, _: usize) -> Self {
        0.0
    }
    #[inline(always)]
    unsafe fn store_first(self, _: *mut f32, _: usize) {}
    #[inline(always)]
    unsafe fn load_pairs(from: *const f32) -> (Self, Self) {
        // SAFETY: the caller's.
        unsafe { (from.read_unaligned(), from.add(1).read_unaligned()) }
    }
    #[inline(always)]
    unsafe fn store_pairs(even: Self, odd: Self, to: *mut f32) {
        // SAFETY: the caller's.
        unsafe {
            to.write_unaligned(even);
            to.add(1).write_unaligned(odd);
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self {
        // SAFETY: the caller's.
        half::f16::from_le_bytes(unsafe { from.cast::<[u8; 2]>().read() }).to_f32()
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> Self {
        // SAFETY: the caller's.
        half::bf16::from_le_bytes(unsafe { from.cast::<[u8; 2]>().read() }).to_f32()
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self {
        // SAFETY: the caller's.
        f32::from(unsafe { from.cast::<i8>().read() })
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u8) {
        // SAFETY: the caller's.
        unsafe { to.cast::<[u8; 2]>().write(half::f16::from_f32(self).to_le_bytes()) }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u8) {
        // SAFETY: the caller's.
        unsafe { to.cast::<[u8; 2]>().write(half::bf16::from_f32(self).to_le_bytes()) }
    }
    #[inline(always)]
    unsafe fn store_i8(self, to: *mut u8) {
        // SAFETY: the caller's.
        unsafe { to.cast::<i8>().write(self as i8) }
    }

    #[inline(always)]
    unsafe fn transpose(_: *mut f32) {}

    #[inline(always)]
    fn ramp() -> Self {
        0.0
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        if self < other { other } else { self }
    }
    #[inline(always)]
    fn floor(self) -> Self {
        f32::floor(self)
    }
    #[inline(always)]
    fn le(self, other: Self) -> bool {
        self <= other
    }
    #[inline(always)]
    fn both(a: bool, b: bool) -> bool {
        a & b
    }
    #[inline(always)]
    fn count(mask: bool) -> usize {
        usize::from(mask)
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        self
    }
    #[inline(always)]
    fn largest(self) -> f32 {
        self
    }
}

#[cfg(test)]
mod tests;
