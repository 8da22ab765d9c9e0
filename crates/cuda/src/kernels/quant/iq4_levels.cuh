// What the codes of IQ4_NL and IQ4_XS stand for (ingle_tensor::quant::iq4_nl::LEVELS), four bytes a word.
#pragma once

#define IQ4_LEVELS 0xBFAD9881u, 0xF6EADDCFu, 0x26190D01u, 0x71594535u
