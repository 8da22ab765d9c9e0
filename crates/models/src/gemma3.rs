//! Gemma 3 (arXiv 2503.19786): Gemma 2 with normalized query and key heads instead of caps; five layers slide to one
//! that does not, which has a rotary base and scaling of its own.

use crate::blocks::Blocks;
use crate::gemma2;
use crate::rope::Scaling;

/// Declares the model.
pub fn build(m: &mut Blocks<'_>) {
    let global = m.rope();
    let local = m.rope_with(m.config.rope_theta_local, Scaling::None);
    gemma2::sandwich(m, global, local, true);
}
