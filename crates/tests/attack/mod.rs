//! Hostile input: small valid files, ways to damage them, and a walk through everything a file can reach.
//!
//! - [`seeds`]: small valid models, made in code.
//! - [`mutations`]: damage, most of it aimed at what a header trusts.
//! - [`walk`]: from the path to two tokens of a reply, refusing or finishing.
//! - [`watch`]: an allocator that counts.
//! - [`driver`]: one input after the other, each judged: no panic, no memory out of proportion, no long wait.

pub mod driver;
pub mod mutations;
pub mod seeds;
pub mod walk;
pub mod watch;
