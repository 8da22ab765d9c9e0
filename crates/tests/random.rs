//! Seeded random numbers for inputs: SplitMix64 (Steele, Lea, Flood, 2014).

/// A generator; equal seeds give equal numbers.
pub struct Random(u64);

impl Random {
    /// A generator for this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number under `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// Roughly normal: the sum of four uniform numbers, scaled to variance 1.
    pub fn normal(&mut self) -> f32 {
        let sum: f64 = (0..4).map(|_| (self.bits() >> 11) as f64 / (1u64 << 53) as f64 - 0.5).sum();
        (sum * 3f64.sqrt()) as f32
    }
}
