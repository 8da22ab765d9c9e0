//! Numbers to test with, and comparisons of results as bits.

pub fn bytes(x: &[f32]) -> Vec<u8> {
    x.iter().flat_map(|x| x.to_ne_bytes()).collect()
}

pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// Where two rows of results differ first, NaN payloads aside.
fn first_difference(got: &[f32], want: &[f32]) -> Option<String> {
    if got.len() != want.len() {
        return Some(format!("{} results for {}", got.len(), want.len()));
    }
    let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
    let at = got.iter().zip(want).position(|(&a, &b)| !same(a, b))?;
    Some(format!(
        "{at}: {:e} ({:08x}) for {:e} ({:08x})",
        got[at],
        got[at].to_bits(),
        want[at],
        want[at].to_bits()
    ))
}

#[track_caller]
pub fn assert_bits(what: &str, got: &[f32], want: &[f32]) {
    if let Some(difference) = first_difference(got, want) {
        panic!("{what}: {difference}");
    }
    // The control: one step in the last place of one result must show.
    if let Some(at) = want.iter().rposition(|x| x.is_finite()) {
        let mut off = want.to_vec();
        off[at] = f32::from_bits(off[at].to_bits() ^ 1);
        assert!(first_difference(got, &off).is_some(), "{what}: a planted difference does not show");
    }
}

/// Numbers of all sizes; with `edges`, those that rounding and limits make special too.
pub fn numbers(seed: u64, count: usize, edges: bool) -> Vec<f32> {
    const EDGES: &[f32] =
        &[0.0, -0.0, 1e-40, -1e-40, 65504.0, 65519.9, 65520.0, -1e30, 3.4e38, f32::INFINITY, f32::NAN];
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u32
    };
    let mut x: Vec<f32> = (0..count)
        .map(|_| {
            let unit = (next() as f32 / u32::MAX as f32) * 2.0 - 1.0;
            unit * 2f32.powi((next() % 12) as i32 - 6)
        })
        .collect();
    if edges {
        x.iter_mut().step_by(23).zip(EDGES).for_each(|(x, edge)| *x = *edge);
    }
    x
}
