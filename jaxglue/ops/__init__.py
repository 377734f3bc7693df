"""Operations, each by itself: one public function, a reference and kernels."""
