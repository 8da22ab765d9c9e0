//! Whether this process may use the processor's matrix tiles (AMX), and their configuration.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
use std::marker::PhantomData;

/// Tiles, int8 and bf16 products, and AVX-512's conversion to bf16, with the system's permission for this process.
///
/// The standard library's feature names for AMX are unstable, so this reads the processor's leaves (Intel's
/// architecture manual, volume 2A, CPUID).
pub fn available() -> bool {
    let leaves = __cpuid(0).eax;
    let feature = |leaf, sub| __cpuid_count(leaf, sub);
    // Bits of leaf 7: EDX 22 amx-bf16, 24 amx-tile, 25 amx-int8. Of leaf 1: ECX 27 osxsave.
    let tiles =
        leaves >= 7 && feature(7, 0).edx & (1 << 22 | 1 << 24 | 1 << 25) == (1 << 22 | 1 << 24 | 1 << 25);
    let saved = leaves >= 1 && feature(1, 0).ecx & 1 << 27 != 0;
    tiles && saved && is_x86_feature_detected!("avx512bf16") && states() && permitted()
}

/// Whether the system saves tile configuration and data (bits 17 and 18 of XCR0).
fn states() -> bool {
    #[target_feature(enable = "xsave")]
    fn enabled() -> u64 {
        // SAFETY: register 0 exists wherever the instruction does.
        unsafe { _xgetbv(0) }
    }
    // SAFETY: the caller has seen that the system has switched the instruction on.
    is_x86_feature_detected!("xsave") && unsafe { enabled() } & (3 << 17) == 3 << 17
}

/// Asks Linux for tile data, which it grants to a process for all its threads, or not.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XTILE_DATA: libc::c_long = 18;
    // SAFETY: the call takes two numbers and changes only what this process may use.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILE_DATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// The tile configuration of one thread, from here until it is dropped.
///
/// Rows have 64 bytes, unless it says otherwise.
pub struct Tiles(PhantomData<*const ()>);

#[repr(C, align(64))]
struct Config([u8; 64]);

impl Tiles {
    /// Eight tiles of 16 rows.
    ///
    /// # Safety
    /// [`available`] said yes.
    pub unsafe fn configure() -> Tiles {
        // SAFETY: the caller's.
        unsafe { Self::with_rows(16) }
    }

    /// Tiles 0 to 5 of so many rows, 1 to 16, for left sides and sums; 6 and 7 of 16, for right sides.
    ///
    /// # Safety
    /// [`available`] said yes.
    pub unsafe fn with_rows(rows: usize) -> Tiles {
        // SAFETY: the caller's.
        unsafe { Self::shaped(|tile| (if tile < 6 { rows } else { 16 }, 64)) }
    }

    /// Tiles 0 to 3 of so many rows, 1 to 16, for sums; 4 and 5 of as many rows of 32 bytes, for left sides; 6 and 7 of
    /// eight, for right sides of 32 bytes to a column.
    ///
    /// # Safety
    /// [`available`] said yes.
    pub unsafe fn of_bytes(rows: usize) -> Tiles {
        let shape = |tile| match tile {
            0..4 => (rows, 64),
            4..6 => (rows, 32),
            _ => (8, 64),
        };
        // SAFETY: the caller's.
        unsafe { Self::shaped(shape) }
    }

    /// Rows, and bytes of each, by tile.
    unsafe fn shaped(shape: impl Fn(usize) -> (usize, u16)) -> Tiles {
        let mut config = Config([0; 64]);
        config.0[0] = 1;
        for tile in 0..8 {
            let (rows, bytes) = shape(tile);
            config.0[16 + 2 * tile..][..2].copy_from_slice(&bytes.to_le_bytes());
            config.0[48 + tile] = rows as u8;
        }
        // SAFETY: the instruction reads 64 bytes, all of which are written above, and changes only tiles.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) config.0.as_ptr(), options(nostack, preserves_flags, readonly))
        };
        Tiles(PhantomData)
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: tiles exist, since they were configured; nobody uses them after this.
        unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) };
    }
}
