//! `mma` in scalar code: what attention computes on tensor cores, with operands of 16 bits and sums in f32.
//!
//! A tensor core adds 16 products to a sum at a time and rounds once; how it rounds is not documented, and not the same in
//! all generations. Here a step is the sum in f64, element by element, rounded to f32: within what the products are, the
//! nearest f32. A GPU may differ in the last places, as [`tolerance`] says.

use half::{bf16, f16};

use crate::reference::kv_round;
use crate::{Graph, KvType, Op};

/// Elements of one step.
pub const STEP: usize = 16;

/// Most dims of a head that tensor cores take.
pub const HEAD_MAX: usize = 256;

/// Whether a head of this size, with keys and values of this type, can be attended to in `mma`.
pub fn serves(head_dim: usize, kv: KvType) -> bool {
    matches!(kv, KvType::F16 | KvType::BF16) && head_dim.is_multiple_of(STEP) && head_dim <= HEAD_MAX
}

/// Whether all attention of a graph can run in `mma`.
pub fn serves_all(graph: &Graph, kv: KvType) -> bool {
    graph.nodes.iter().all(|node| match &node.op {
        Op::Attention { spec, .. } => serves(spec.head_dim, kv),
        _ => true,
    })
}

/// A query as it enters products: the type of the keys, which saturates as they do.
pub fn query(kv: KvType, q: &[f32]) -> Vec<f32> {
    let mut q = q.to_vec();
    kv_round(kv, &mut q, &mut 0);
    q
}

/// A weight as it enters products: at most 1, so that nothing saturates.
pub fn weight(kv: KvType, p: f32) -> f32 {
    match kv {
        KvType::BF16 => bf16::from_f32(p).to_f32(),
        _ => f16::from_f32(p).to_f32(),
    }
}

/// c plus the products of up to [`STEP`] elements.
pub fn step(c: f32, products: impl Iterator<Item = (f32, f32)>) -> f32 {
    products.fold(f64::from(c), |sum, (a, b)| sum + f64::from(a) * f64::from(b)) as f32
}

/// Dot product: steps in order, from +0.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let steps = a.chunks(STEP).zip(b.chunks(STEP));
    steps.fold(0.0, |c, (a, b)| step(c, a.iter().copied().zip(b.iter().copied())))
}

/// How far an output of attention may be from this definition on a GPU. Its sums differ in the last places of f32; but a
/// weight that lies between two numbers of 16 bits may be rounded to the other one, which moves an output by up to a last
/// place of that type, of the largest value.
pub fn tolerance(kv: KvType, largest: f32) -> f32 {
    let place = if kv == KvType::BF16 { 2f32.powi(-8) } else { 2f32.powi(-11) };
    largest * place
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A step is rounded once, and steps are in order.
    #[test]
    fn a_step_is_rounded_once() {
        let big = 16_777_216.0;
        let sum = |places: &[(usize, f32)]| {
            let mut a = [0.0; 32];
            places.iter().for_each(|&(k, x)| a[k] = x);
            dot(&a, &[1.0; 32])
        };
        // 2^24 + 1 is not an f32.
        assert_eq!(sum(&[(0, big), (1, 1.0), (15, -big)]), 1.0);
        assert_eq!(sum(&[(0, big), (1, 1.0), (16, -big)]), 0.0);
        assert_eq!(sum(&[(0, big), (16, 1.0), (17, -big)]), 1.0);
    }

    #[test]
    fn what_heads_are_served() {
        assert!(serves(64, KvType::F16) && serves(80, KvType::BF16) && serves(256, KvType::F16));
        assert!(!serves(64, KvType::F32) && !serves(64, KvType::Q8_0));
        assert!(!serves(20, KvType::F16) && !serves(512, KvType::F16));
    }
}
